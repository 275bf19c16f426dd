"""Generate: the raw policy as a stream."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import rollout_pb2, trajectory_pb2


def request(tokens: list[int], max_tokens: int = 10, seed: int = 1, **settings: Any) -> rollout_pb2.GenerateRequest:
    cache_key = settings.pop("cache_key", "")
    sampling = trajectory_pb2.SamplingSettings(max_tokens=max_tokens, **settings)
    return rollout_pb2.GenerateRequest(token_ids=tokens, sampling=sampling, seed=seed, cache_key=cache_key)


async def collect(bench: Any, asked: rollout_pb2.GenerateRequest) -> tuple[list[int], list[float], int]:
    pieces = [piece async for piece in bench.client.generate(asked, timeout_s=20)]
    assert all(len(piece.token_ids) == len(piece.logprobs) for piece in pieces)
    assert all(piece.stop_reason == trajectory_pb2.STOP_REASON_UNSPECIFIED for piece in pieces[:-1])
    tokens = [token for piece in pieces for token in piece.token_ids]
    return tokens, [logprob for piece in pieces for logprob in piece.logprobs], pieces[-1].stop_reason


async def test_tokens_are_streamed_and_follow_from_the_seed(serve: Any) -> None:
    async with serve() as bench:
        asked = request([5, 6, 7], stop_token_ids=[0], max_tokens=30)
        pieces = [piece async for piece in bench.client.generate(asked, timeout_s=20)]
        assert len(pieces) > 1
        first = await collect(bench, asked)
        assert first == await collect(bench, asked)
        assert [token for piece in pieces for token in piece.token_ids] == first[0]
        assert first[0] != (await collect(bench, request([5, 6, 7], seed=2, stop_token_ids=[0], max_tokens=30)))[0]
        assert first[2] == trajectory_pb2.STOP_REASON_MAX_TOKENS


async def test_stop_tokens_and_the_length_limit(serve: Any) -> None:
    async with serve() as bench:
        tokens, _, _ = await collect(bench, request([5, 6, 7], stop_token_ids=[0], max_tokens=9))
        until = tokens.index(tokens[3]) + 1
        stopped = await collect(bench, request([5, 6, 7], stop_token_ids=[tokens[3]], max_tokens=9))
        assert stopped[0] == tokens[:until] and stopped[2] == trajectory_pb2.STOP_REASON_STOP_TOKEN
        limited = await collect(bench, request([5] * 509, stop_token_ids=[0], max_tokens=100))
        assert len(limited[0]) == 3 and limited[2] == trajectory_pb2.STOP_REASON_LENGTH_LIMIT


async def test_greedy_and_raw_log_probabilities(serve: Any) -> None:
    async with serve() as bench:
        greedy = await collect(bench, request([5, 6], temperature=0))
        assert greedy[1] == [0.0] * len(greedy[1])
        raw = await collect(bench, request([5, 6], temperature=0, logprob_mode=trajectory_pb2.LOGPROB_MODE_RAW))
        assert raw[0] == greedy[0] and all(logprob < 0 for logprob in raw[1])


async def test_a_cache_key_changes_nothing_but_the_time(serve: Any) -> None:
    async with serve() as bench:
        tokens = [5, 6, 7]
        for turn in range(3):
            kept = await collect(bench, request(tokens, seed=turn, cache_key="agent", stop_token_ids=[0]))
            fresh = await collect(bench, request(tokens, seed=turn, stop_token_ids=[0]))
            assert kept[0] == fresh[0] and kept[1] == pytest.approx(fresh[1], abs=1e-4)
            tokens = [*tokens, *kept[0], 9, 10]


async def test_cancelling_aborts_the_generation(serve: Any) -> None:
    async with serve() as bench:
        stream = bench.client.generate(request([5], 500, stop_token_ids=[0]), timeout_s=20)
        await anext(stream)
        await stream.aclose()
        policy = bench.server._servicer.parts.policy
        assert await policy.drain(30)
        await policy.engine.held_digest()  # read between two passes, after the abort
        drawn = (await bench.client.get_info()).generated_tokens
        assert drawn < 500
        await asyncio.sleep(0.05)
        assert (await bench.client.get_info()).generated_tokens == drawn


@pytest.mark.parametrize(
    ("asked", "reason", "field"),
    [
        (request([]), Reason.INVALID_FIELD, "token_ids"),
        (request([5, 10_000]), Reason.INVALID_FIELD, "token_ids[1]"),
        (request([-1]), Reason.INVALID_FIELD, "token_ids[0]"),
        (request([5] * 512), Reason.PROMPT_TOO_LONG, "token_ids"),
        (request([5], 0), Reason.INVALID_FIELD, "sampling.max_tokens"),
        (request([5], top_p=2.0), Reason.INVALID_FIELD, "sampling.top_p"),
        (request([5], cache_key="x" * 65), Reason.INVALID_FIELD, "cache_key"),
    ],
)
async def test_bad_requests(serve: Any, asked: rollout_pb2.GenerateRequest, reason: Reason, field: str) -> None:
    async with serve() as bench:
        with pytest.raises(RollwireError) as caught:
            await collect(bench, asked)
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
        assert list(caught.value.fields) == [field]


async def test_too_many_calls_are_refused_with_a_delay(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollwire.rollout.servicer._MAX_GENERATE_CALLS", 1)
    async with serve() as bench:
        stream = bench.client.generate(request([5], 400, stop_token_ids=[0]), timeout_s=20)
        await anext(stream)
        with pytest.raises(RollwireError) as caught:
            await collect(bench, request([5]))
        assert (caught.value.code, caught.value.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            Reason.REQUESTS_EXHAUSTED,
        )
        await stream.aclose()
