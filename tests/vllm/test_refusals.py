"""What vLLM cannot do is refused before it does something else."""

from __future__ import annotations

from typing import Any

import pytest

from rollwire.rollout.engine import GenerationError, GenerationRequest
from rollwire.rollout.engines.vllm_engine import VllmEngine
from rollwire.v1 import trajectory_pb2

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
PROMPT = [(7 * position + 3) % 90 for position in range(41)]


@pytest.mark.parametrize(
    ("changes", "limit", "words"),
    [
        ({"temperature": 0.001}, 256, "0.001; the vllm engine takes 0 or at least 0.01"),
        ({}, len(PROMPT), "max_tokens"),
        ({"temperature": 0.5, "logprob_mode": trajectory_pb2.LOGPROB_MODE_RAW, "max_tokens": 215}, 256, "SAMPLED"),
    ],
)
async def test_what_vllm_cannot_do_is_one_line(
    kit: Any, shared_engine: VllmEngine, changes: dict[str, Any], limit: int, words: str
) -> None:
    model = kit.make_model("qwen2_tied", seed=11)
    await shared_engine.load_weights(kit.version(1), kit.host_tensors(model))
    with pytest.raises(GenerationError, match=words) as raised:
        await kit.complete(shared_engine, GenerationRequest(PROMPT, kit.sampling(**changes), 1, limit))
    assert "\n" not in str(raised.value)
    assert (await kit.complete(shared_engine, GenerationRequest(PROMPT, kit.sampling(2), 1, 256))).token_ids
