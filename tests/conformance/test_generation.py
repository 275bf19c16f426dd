"""Stopping, limits, streams, seeds and aborts."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import engine_kit as kit
import pytest

from rollwire.rollout.continuation import continuation
from rollwire.rollout.engine import GenerationRequest
from rollwire.v1 import trajectory_pb2

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
PROMPT = [(7 * position + 3) % 90 for position in range(41)]
END = 2


def ask(max_tokens: int, seed: int = 5, limit: int = kit.MAX_TOKENS, **changes: Any) -> GenerationRequest:
    stream = changes.pop("stream", False)
    return GenerationRequest(PROMPT, kit.sampling(max_tokens, **changes), seed, limit, stream=stream)


async def under_way(subject: Any) -> None:
    """Waits until generations that were just started have drawn tokens: those of a stream started after them."""
    await asyncio.sleep(0)
    tokens = 5
    async with aclosing(subject.engine.generate(ask(200, stream=True))) as pieces:
        async for piece in pieces:
            tokens -= len(piece.token_ids)
            if tokens <= 0:
                break


async def test_reasons_to_stop(subject: Any) -> None:
    free = await kit.complete(subject.engine, ask(12))
    assert free.stop_reason == trajectory_pb2.STOP_REASON_MAX_TOKENS
    assert len(free.token_ids) == len(free.logprobs) == 12
    # The same draws again, stopped by the token that the ninth draw gave, unless an earlier one gave it too.
    stop = free.token_ids[8]
    first = free.token_ids.index(stop)
    absent = min(set(range(kit.VOCABULARY)) - set(free.token_ids))
    stopped = await kit.complete(subject.engine, ask(12, stop_token_ids=frozenset({stop, absent})))
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.stop_reason == trajectory_pb2.STOP_REASON_STOP_TOKEN
    limited = await kit.complete(subject.engine, ask(12, limit=len(PROMPT) + 5))
    assert limited.token_ids == free.token_ids[:5]
    assert limited.stop_reason == trajectory_pb2.STOP_REASON_LENGTH_LIMIT


async def test_of_several_reasons_the_token_comes_first_then_the_length(subject: Any) -> None:
    free = await kit.complete(subject.engine, ask(6))
    stop = frozenset({free.token_ids[-1]})
    count = free.token_ids.index(free.token_ids[-1]) + 1
    for limit in (kit.MAX_TOKENS, len(PROMPT) + count):
        piece = await kit.complete(subject.engine, ask(count, stop_token_ids=stop, limit=limit))
        assert piece.stop_reason == trajectory_pb2.STOP_REASON_STOP_TOKEN
    piece = await kit.complete(subject.engine, ask(6, limit=len(PROMPT) + 6))
    assert piece.stop_reason == trajectory_pb2.STOP_REASON_LENGTH_LIMIT


async def test_tokens_are_counted(subject: Any) -> None:
    before = subject.engine.generated_tokens
    await asyncio.gather(*(kit.complete(subject.engine, ask(9, seed)) for seed in range(20)))
    assert subject.engine.generated_tokens - before == 180


async def test_the_longest_sequence(subject: Any) -> None:
    prompt = [position % 90 for position in range(kit.MAX_TOKENS - 1)]
    request = GenerationRequest(prompt, kit.sampling(8), 1, kit.MAX_TOKENS)
    piece = await kit.complete(subject.engine, request)
    assert len(piece.token_ids) == 1
    assert piece.stop_reason == trajectory_pb2.STOP_REASON_LENGTH_LIMIT
    assert kit.gap(subject.model, request, piece) < subject.bound


async def test_the_models_own_end_token_stops_only_when_asked(subject: Any) -> None:
    """With random weights every token is about as probable: the end token comes up often."""
    pieces = await asyncio.gather(*(kit.complete(subject.engine, ask(64, seed, temperature=2.0)) for seed in range(16)))
    assert any(END in piece.token_ids[:-1] for piece in pieces)
    assert all(len(piece.token_ids) == 64 for piece in pieces)


async def test_a_stream_is_the_same_generation_in_pieces(subject: Any) -> None:
    whole = await kit.complete(subject.engine, ask(12))
    pieces = [piece async for piece in subject.engine.generate(ask(12, stream=True))]
    assert len(pieces) > 3
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [value for piece in pieces for value in piece.logprobs] == pytest.approx(whole.logprobs, abs=subject.bound)
    reasons = [piece.stop_reason for piece in pieces]
    assert reasons[-1] == trajectory_pb2.STOP_REASON_MAX_TOKENS
    assert set(reasons[:-1]) == {trajectory_pb2.STOP_REASON_UNSPECIFIED}


async def test_a_seed_gives_the_same_tokens_whatever_else_runs(subject: Any) -> None:
    request = ask(16, (1 << 64) - 1)
    alone = await kit.complete(subject.engine, request)
    others = [
        GenerationRequest(PROMPT[: 5 + seed], kit.sampling(4 + seed, temperature=float(seed % 2)), seed, 256)
        for seed in range(30)
    ]
    crowd = await asyncio.gather(
        *(kit.complete(subject.engine, each) for each in [*others[:15], request, *others[15:]])
    )
    assert crowd[15].token_ids == alone.token_ids
    assert (await kit.complete(subject.engine, ask(16, 7))).token_ids != alone.token_ids


async def test_more_prompt_tokens_at_once_than_a_pass_takes(subject: Any) -> None:
    """Without the settings of the vllm engine, vLLM splits one of the seeded prompts on a CPU and dies."""
    requests = [
        GenerationRequest([(seed * 3 + position) % 90 for position in range(250)], kit.sampling(6), seed, 256)
        for seed in range(40)
    ]
    pieces = await asyncio.gather(*(kit.complete(subject.engine, request) for request in requests))
    assert all(len(piece.token_ids) == 6 for piece in pieces)
    assert max(kit.gap(subject.model, *pair) for pair in zip(requests, pieces, strict=True)) < subject.bound


async def test_a_prefix_that_was_computed_before_changes_nothing(subject: Any) -> None:
    """Turns of an episode, each extending the last; and a key whose sequence went another way."""
    tokens = PROMPT[:9]
    for turn in range(6):
        request = GenerationRequest(tokens, kit.sampling(7), turn, kit.MAX_TOKENS, "conformance-episode")
        piece = await kit.complete(subject.engine, request)
        assert kit.gap(subject.model, request, piece) < subject.bound
        tokens = [*tokens, *piece.token_ids, 40 + turn, 41, 42]
        if turn == 3:
            tokens = [*tokens[:20], 77, *tokens[21:]]
    subject.engine.release("conformance-episode")
    subject.engine.release("never seen")


async def test_abort_returns_what_was_drawn(subject: Any) -> None:
    asked = [GenerationRequest(PROMPT[:9], kit.sampling(240), seed, 256) for seed in range(24)]
    some = kit.SEQUENCES - 1
    running = [asyncio.create_task(kit.complete(subject.engine, request)) for request in asked[:some]]
    await under_way(subject)
    # Most of these find no free place: they wait in the engine and are aborted as well.
    running += [asyncio.create_task(kit.complete(subject.engine, request)) for request in asked[some:]]
    await asyncio.sleep(0)
    await subject.engine.abort_all()
    pieces = await asyncio.wait_for(asyncio.gather(*running), 10)
    assert {piece.stop_reason for piece in pieces} == {trajectory_pb2.STOP_REASON_ABORTED}
    assert all(0 < len(piece.token_ids) == len(piece.logprobs) < 240 for piece in pieces[:some])
    assert max(kit.gap(subject.model, *pair) for pair in zip(asked, pieces, strict=True)) < subject.bound
    after = await kit.complete(subject.engine, ask(4))
    assert after.stop_reason == trajectory_pb2.STOP_REASON_MAX_TOKENS


async def test_abort_catches_generations_that_were_only_just_submitted(subject: Any) -> None:
    running = [asyncio.create_task(kit.complete(subject.engine, ask(200, seed))) for seed in range(16)]
    await asyncio.sleep(0)
    await subject.engine.abort_all()
    pieces = await asyncio.wait_for(asyncio.gather(*running), 10)
    assert {piece.stop_reason for piece in pieces} == {trajectory_pb2.STOP_REASON_ABORTED}


async def test_a_closed_iterator_aborts(subject: Any) -> None:
    async with aclosing(subject.engine.generate(ask(200, stream=True))) as pieces:
        async for _ in pieces:
            break
    cancelled = asyncio.create_task(kit.complete(subject.engine, ask(200)))
    await asyncio.sleep(0.05)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    # Nothing is left for abort_all to wait for.
    await asyncio.wait_for(subject.engine.abort_all(), 1)


async def test_a_load_follows_an_abort_whose_receiver_does_not_read(subject: Any) -> None:
    stalled = subject.engine.generate(ask(200, stream=True))
    await anext(stalled)
    await asyncio.wait_for(subject.engine.abort_all(), 15)
    await subject.load()
    rest = [piece async for piece in stalled]
    assert rest[-1].stop_reason == trajectory_pb2.STOP_REASON_ABORTED


async def test_an_aborted_generation_goes_on_under_new_weights(subject: Any) -> None:
    """`keep`: abort, load, continue; each piece is of one version and scored by it."""
    old, request = kit.make_model("qwen2_tied", seed=11), ask(200)
    running = asyncio.create_task(kit.complete(subject.engine, request))
    await under_way(subject)
    await subject.engine.abort_all()
    first = await running
    assert first.token_ids
    assert first.stop_reason == trajectory_pb2.STOP_REASON_ABORTED
    kit.perturb(subject.model, 0.1)
    await subject.load()
    rest = continuation(request, first.token_ids)
    second = await kit.complete(subject.engine, rest)
    assert (first.version.step, second.version.step) == (1, 2)
    assert len(first.token_ids) + len(second.token_ids) == 200
    assert kit.gap(old, request, first) < subject.bound
    assert kit.gap(subject.model, rest, second) < subject.bound < kit.gap(old, rest, second)
