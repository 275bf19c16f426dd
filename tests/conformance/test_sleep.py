"""Sleep and wake of a real engine: what it held it holds again, or takes anew from a load."""

from __future__ import annotations

from typing import Any

import engine_kit as kit
import pytest

from rollwire.rollout.engine import GenerationRequest
from rollwire.v1 import rollout_pb2

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
HOST, DISCARD = rollout_pb2.SLEEP_LEVEL_HOST, rollout_pb2.SLEEP_LEVEL_DISCARD


@pytest.mark.parametrize("model_name", ["qwen2_tied", "llama_untied"])
@pytest.mark.parametrize("levels", [[HOST], [DISCARD], [HOST, DISCARD]], ids=["host", "discard", "host-discard"])
async def test_what_serves_after_sleep(subject: Any, levels: list[int]) -> None:
    engine = subject.engine
    prompts = [[5 + number, 6, 7, 8, 9] * (number + 1) for number in range(3)]
    requests = [GenerationRequest(prompt, kit.sampling(12), 40, kit.MAX_TOKENS) for prompt in prompts]
    before = [await kit.complete(engine, request) for request in requests]
    digest = await engine.held_digest()
    freed = [await engine.sleep(level) for level in levels]
    if engine.description.device == "cpu":
        assert freed == [0] * len(levels)
    else:
        assert freed[0] > 0
    await engine.wake()
    if DISCARD in levels:
        await subject.load()
    assert await engine.held_digest() == digest
    after = [await kit.complete(engine, request) for request in requests]
    assert [piece.token_ids for piece in after] == [piece.token_ids for piece in before]
    for request, piece in zip(requests, after, strict=True):
        assert piece.version == subject.version
        assert kit.gap(subject.model, request, piece) < subject.bound
