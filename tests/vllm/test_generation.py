"""Stopping, limits, streaming, seeds, aborts, and prompts that vLLM would split over passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio
import torch

from rollwire.rollout.continuation import continuation
from rollwire.rollout.engine import GenerationError, GenerationRequest
from rollwire.rollout.engines.vllm_engine import VllmEngine
from rollwire.v1 import trajectory_pb2

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
PROMPT = [(7 * position + 3) % 90 for position in range(41)]
END = 2


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(kit: Any, shared_engine: VllmEngine) -> AsyncIterator[VllmEngine]:
    model = kit.make_model("qwen2_tied", seed=11)
    await shared_engine.load_weights(kit.version(1), kit.host_tensors(model))
    yield shared_engine


async def test_reasons_to_stop(kit: Any, engine: VllmEngine) -> None:
    free = await kit.complete(engine, GenerationRequest(PROMPT, kit.sampling(12), 5, 256))
    assert free.stop_reason == trajectory_pb2.STOP_REASON_MAX_TOKENS
    assert len(free.token_ids) == len(free.logprobs) == 12
    # The same draws again, stopped by the token that the ninth draw gave, unless an earlier one gave it too.
    stop = free.token_ids[8]
    first = free.token_ids.index(stop)
    stopped = await kit.complete(
        engine, GenerationRequest(PROMPT, kit.sampling(12, stop_token_ids=frozenset({stop})), 5, 256)
    )
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.stop_reason == trajectory_pb2.STOP_REASON_STOP_TOKEN
    limited = await kit.complete(engine, GenerationRequest(PROMPT, kit.sampling(12), 5, len(PROMPT) + 5))
    assert limited.token_ids == free.token_ids[:5]
    assert limited.stop_reason == trajectory_pb2.STOP_REASON_LENGTH_LIMIT
    both = await kit.complete(
        engine, GenerationRequest(PROMPT, kit.sampling(first + 1, stop_token_ids=frozenset({stop})), 5, 256)
    )
    assert both.stop_reason == trajectory_pb2.STOP_REASON_STOP_TOKEN


async def test_the_longest_sequence(kit: Any, engine: VllmEngine) -> None:
    prompt = [position % 90 for position in range(kit.MAX_TOKENS - 1)]
    piece = await kit.complete(engine, GenerationRequest(prompt, kit.sampling(8), 1, kit.MAX_TOKENS))
    assert len(piece.token_ids) == 1
    assert piece.stop_reason == trajectory_pb2.STOP_REASON_LENGTH_LIMIT


async def test_the_models_own_end_token_stops_only_when_asked(kit: Any, engine: VllmEngine) -> None:
    """With random weights every token is about as probable: the end token comes up often."""
    requests = [GenerationRequest(PROMPT, kit.sampling(64, temperature=2.0), seed, 256) for seed in range(16)]
    pieces = await asyncio.gather(*(kit.complete(engine, request) for request in requests))
    assert any(END in piece.token_ids[:-1] for piece in pieces)
    assert all(len(piece.token_ids) == 64 for piece in pieces)


async def test_a_stream_is_the_same_generation_in_pieces(kit: Any, engine: VllmEngine) -> None:
    whole = await kit.complete(engine, GenerationRequest(PROMPT, kit.sampling(12), 5, 256))
    pieces = [
        piece async for piece in engine.generate(GenerationRequest(PROMPT, kit.sampling(12), 5, 256, stream=True))
    ]
    assert len(pieces) > 3
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [value for piece in pieces for value in piece.logprobs] == pytest.approx(whole.logprobs, abs=1e-5)
    reasons = [piece.stop_reason for piece in pieces]
    assert reasons[-1] == trajectory_pb2.STOP_REASON_MAX_TOKENS
    assert set(reasons[:-1]) == {trajectory_pb2.STOP_REASON_UNSPECIFIED}


async def test_a_seed_gives_the_same_tokens_whatever_else_runs(kit: Any, engine: VllmEngine) -> None:
    request = GenerationRequest(PROMPT, kit.sampling(16), (1 << 64) - 1, 256)
    alone = await kit.complete(engine, request)
    others = [
        GenerationRequest(PROMPT[: 5 + seed], kit.sampling(4 + seed, temperature=float(seed % 2)), seed, 256)
        for seed in range(30)
    ]
    crowd = await asyncio.gather(*(kit.complete(engine, each) for each in [*others[:15], request, *others[15:]]))
    assert crowd[15].token_ids == alone.token_ids
    different = await kit.complete(engine, GenerationRequest(PROMPT, kit.sampling(16), 7, 256))
    assert different.token_ids != alone.token_ids


async def test_long_seeded_prompts_at_once_do_not_kill_the_engine(kit: Any, engine: VllmEngine) -> None:
    """More prompt tokens than fit a pass: without the engine's settings vLLM splits one of them and dies.

    `test_faults.py` shows that it does.
    """
    requests = [
        GenerationRequest([(seed * 3 + position) % 90 for position in range(250)], kit.sampling(6), seed, 256)
        for seed in range(40)
    ]
    pieces = await asyncio.gather(*(kit.complete(engine, request) for request in requests))
    assert all(len(piece.token_ids) == 6 for piece in pieces)


async def test_abort_returns_what_was_drawn(kit: Any, engine: VllmEngine) -> None:
    before = engine.generated_tokens
    running = [
        asyncio.create_task(kit.complete(engine, GenerationRequest(PROMPT[:9], kit.sampling(240), seed, 256)))
        for seed in range(24)
    ]
    await asyncio.sleep(0.3)
    await engine.abort_all()
    pieces = await asyncio.wait_for(asyncio.gather(*running), 10)
    aborted = [piece for piece in pieces if piece.stop_reason == trajectory_pb2.STOP_REASON_ABORTED]
    assert aborted
    assert any(piece.token_ids for piece in aborted)
    assert all(len(piece.token_ids) == len(piece.logprobs) < 240 for piece in aborted)
    assert engine.generated_tokens - before == sum(len(piece.token_ids) for piece in pieces)
    after = await kit.complete(engine, GenerationRequest(PROMPT, kit.sampling(4), 1, 256))
    assert after.stop_reason == trajectory_pb2.STOP_REASON_MAX_TOKENS


async def test_abort_catches_generations_that_were_only_just_submitted(kit: Any, engine: VllmEngine) -> None:
    running = [
        asyncio.create_task(kit.complete(engine, GenerationRequest(PROMPT[:9], kit.sampling(240), seed, 256)))
        for seed in range(16)
    ]
    await asyncio.sleep(0)
    await engine.abort_all()
    pieces = await asyncio.wait_for(asyncio.gather(*running), 10)
    assert {piece.stop_reason for piece in pieces} == {trajectory_pb2.STOP_REASON_ABORTED}


async def test_a_closed_iterator_aborts(kit: Any, engine: VllmEngine) -> None:
    request = GenerationRequest(PROMPT[:9], kit.sampling(240), 1, 256, stream=True)
    async with aclosing(engine.generate(request)) as pieces:
        async for _ in pieces:
            break
    cancelled = asyncio.create_task(kit.complete(engine, request))
    await asyncio.sleep(0.05)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    # Nothing is left for abort_all to wait for.
    await asyncio.wait_for(engine.abort_all(), 1)


async def test_a_load_follows_an_abort_whose_receiver_does_not_read(kit: Any, engine: VllmEngine) -> None:
    stalled = engine.generate(GenerationRequest(PROMPT[:9], kit.sampling(240), 1, 256, stream=True))
    await anext(stalled)
    await asyncio.wait_for(engine.abort_all(), 15)
    model = kit.make_model("qwen2_tied", seed=11)
    await engine.load_weights(kit.version(1), kit.host_tensors(model))
    rest = [piece async for piece in stalled]
    assert rest[-1].stop_reason == trajectory_pb2.STOP_REASON_ABORTED


async def test_a_kept_generation_goes_on_under_new_weights(kit: Any, engine: VllmEngine) -> None:
    """`keep`: abort, load, continue; each piece is of one version and scored by it."""
    models = [kit.make_model("qwen2_tied", seed=seed) for seed in (11, 12)]
    request = GenerationRequest(PROMPT[:9], kit.sampling(240), 5, 256)
    running = asyncio.create_task(kit.complete(engine, request))
    await asyncio.sleep(0.2)
    await engine.abort_all()
    first = await running
    assert first.stop_reason == trajectory_pb2.STOP_REASON_ABORTED
    await engine.load_weights(kit.version(2), kit.host_tensors(models[1]))
    rest = continuation(request, first.token_ids)
    second = await kit.complete(engine, rest)
    assert (first.version.step, second.version.step) == (1, 2)
    assert len(first.token_ids) + len(second.token_ids) == 240
    for model, asked, piece in ((models[0], request, first), (models[1], rest, second)):
        expected = kit.reference_logprobs(model, asked, piece.token_ids)
        assert float((torch.tensor(piece.logprobs) - expected).abs().max()) < 1e-4
    await engine.load_weights(kit.version(1), kit.host_tensors(models[0]))


@pytest.mark.parametrize(
    ("changes", "limit", "words"),
    [
        ({"temperature": 0.001}, 256, "0.001; the vllm engine takes 0 or at least 0.01"),
        ({}, len(PROMPT), "max_tokens"),
        ({"temperature": 0.5, "logprob_mode": trajectory_pb2.LOGPROB_MODE_RAW, "max_tokens": 215}, 256, "SAMPLED"),
    ],
)
async def test_what_vllm_cannot_do_is_one_line(
    kit: Any, engine: VllmEngine, changes: dict[str, Any], limit: int, words: str
) -> None:
    with pytest.raises(GenerationError, match=words) as raised:
        await kit.complete(engine, GenerationRequest(PROMPT, kit.sampling(**changes), 1, limit))
    assert "\n" not in str(raised.value)
    assert (await kit.complete(engine, GenerationRequest(PROMPT, kit.sampling(2), 1, 256))).token_ids
