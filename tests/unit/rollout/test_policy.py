"""The gate of the policy: who makes way, who goes on afterwards, and which version each token names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.rollout.continuation import reason_to_stop
from rollwire.rollout.engine import Engine, GenerationRequest, Piece, Sampling
from rollwire.rollout.policy import Hold, Policy
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2

WAIT, ABORT, KEEP = rollout_pb2.PAUSE_MODE_WAIT, rollout_pb2.PAUSE_MODE_ABORT, rollout_pb2.PAUSE_MODE_KEEP
GOES_ON = trajectory_pb2.STOP_REASON_UNSPECIFIED
ABORTED = trajectory_pb2.STOP_REASON_ABORTED


def version(step: int) -> weights_pb2.WeightVersion:
    return weights_pb2.WeightVersion(lineage="main", step=step)


def request(max_tokens: int = 20, limit: int = 100, stop: int = -1, stream: bool = True) -> GenerationRequest:
    sampling = Sampling(1.0, 1.0, 0, max_tokens, frozenset({stop}), trajectory_pb2.LOGPROB_MODE_SAMPLED)
    return GenerationRequest([0, 1, 2], sampling, 7, limit, stream=stream)


class Counting:
    """An engine that draws each token's position, one per turn of the event loop; its log-probability is minus the step
    of the weights that really drew it."""

    def __init__(self) -> None:
        self.step = 0
        self.loads = 0
        self.running = 0
        self.ever = 0
        self._abort = asyncio.Event()

    async def generate(self, asked: GenerationRequest) -> AsyncGenerator[Piece, None]:
        self.running += 1
        self.ever += 1
        abort = self._abort
        drawn: list[int] = []
        logprobs: list[float] = []
        reported = 0
        try:
            stopped = GOES_ON
            while stopped == GOES_ON:
                await asyncio.sleep(0)
                if abort.is_set():
                    stopped = ABORTED
                else:
                    drawn.append(len(asked.token_ids) + len(drawn))
                    logprobs.append(-float(self.step))
                    stopped = reason_to_stop(asked, drawn)
                if asked.stream or stopped != GOES_ON:
                    yield Piece(drawn[reported:], logprobs[reported:], version(self.step), stopped)
                    reported = len(drawn)
        finally:
            self.running -= 1

    async def abort_all(self) -> None:
        self._abort.set()
        self._abort = asyncio.Event()
        while self.running:
            await asyncio.sleep(0)


def policy_of(engine: Counting) -> Policy:
    policy = Policy(cast(Engine, engine))
    activate(policy, 0)
    return policy


def activate(policy: Policy, step: int) -> None:
    states = policy.states
    states.begin(version(step))
    for arrow in (states.verified, states.prepared, states.drained):
        arrow(version(step))
    states.loaded(version(step), b"digest", b"digest")
    cast(Any, policy.engine).step = step


async def update(policy: Policy, step: int, mode: Any) -> int:
    policy.close_gate(Hold.UPDATE)
    interrupted = await policy.make_way(Hold.UPDATE, mode, 5.0)
    assert cast(Any, policy.engine).running == 0
    activate(policy, step)
    policy.open_gate(Hold.UPDATE)
    return interrupted


async def collected(policy: Policy, asked: GenerationRequest) -> list[Piece]:
    return [piece async for piece in policy.generate(asked)]


def tokens_of(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


async def ticks(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 15),
    st.integers(4, 20),
    st.integers(3, 25),
    st.booleans(),
    st.lists(st.integers(0, 8), max_size=4),
)
def test_what_is_kept_goes_on_as_if_nothing_had_happened_but_for_the_version(
    max_tokens: int, limit: int, stop: int, stream: bool, pauses: list[int]
) -> None:
    async def run() -> None:
        asked = request(max_tokens, limit, stop, stream)
        whole = await collected(policy_of(Counting()), asked)
        policy = policy_of(Counting())
        running = asyncio.create_task(collected(policy, asked))
        for step, pause in enumerate(pauses, 1):
            await ticks(pause)
            await update(policy, step, KEEP)
        pieces = await running
        assert tokens_of(pieces) == tokens_of(whole)
        assert pieces[-1].stop_reason == whole[-1].stop_reason != ABORTED
        assert all(piece.stop_reason == GOES_ON for piece in pieces[:-1])
        for piece in pieces:
            assert piece.logprobs == [-float(piece.version.step)] * len(piece.token_ids)
        steps = [piece.version.step for piece in pieces]
        assert steps == sorted(steps)
        assert await policy.drain(0.0)

    asyncio.run(run())


async def test_modes() -> None:
    policy = policy_of(Counting())
    running = asyncio.create_task(collected(policy, request(max_tokens=10)))
    await ticks(3)
    assert await update(policy, 1, WAIT) == 0
    pieces = await running
    assert len(tokens_of(pieces)) == 10 and {piece.version.step for piece in pieces} == {0}

    running = asyncio.create_task(collected(policy, request(max_tokens=10)))
    await ticks(3)
    assert await update(policy, 2, ABORT) == 1
    pieces = await running
    assert pieces[-1].stop_reason == ABORTED and 0 < len(tokens_of(pieces)) < 10

    running = asyncio.create_task(collected(policy, request(max_tokens=10)))
    await ticks(3)
    assert await update(policy, 3, KEEP) == 1
    pieces = await running
    assert len(tokens_of(pieces)) == 10 and {piece.version.step for piece in pieces} == {2, 3}


async def test_who_does_not_end_in_time_is_aborted() -> None:
    policy = policy_of(Counting())
    running = asyncio.create_task(collected(policy, request(max_tokens=10**9, limit=10**9)))
    await ticks(3)
    policy.close_gate(Hold.PAUSE)
    assert await policy.make_way(Hold.PAUSE, WAIT, 0.01) == 1
    assert (await running)[-1].stop_reason == ABORTED


async def test_a_hold_that_ends_while_it_waits_interrupts_nobody() -> None:
    policy = policy_of(Counting())
    running = asyncio.create_task(collected(policy, request(max_tokens=10**9, limit=10**9)))
    await ticks(3)
    policy.close_gate(Hold.PAUSE)
    making_way = asyncio.create_task(policy.make_way(Hold.PAUSE, WAIT, 0.02))
    await ticks(3)
    policy.open_gate(Hold.PAUSE)
    assert await making_way == 0
    assert cast(Any, policy.engine).running == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await policy.drain(1)


async def test_the_gate_opens_when_the_last_hold_ends() -> None:
    policy = policy_of(Counting())
    for hold in Hold:
        policy.close_gate(hold)
        policy.close_gate(hold)
    running = asyncio.create_task(collected(policy, request()))
    for hold in Hold:
        await ticks(3)
        assert not policy.admits and cast(Any, policy.engine).ever == 0
        policy.open_gate(hold)
        policy.open_gate(hold)
    assert policy.admits
    assert (await running)[-1].stop_reason == trajectory_pb2.STOP_REASON_MAX_TOKENS


async def test_what_is_kept_fails_when_nothing_serves_afterwards() -> None:
    policy = policy_of(Counting())
    running = asyncio.create_task(collected(policy, request(max_tokens=1000, limit=10_000)))
    await ticks(3)
    policy.close_gate(Hold.UPDATE)
    await policy.make_way(Hold.UPDATE, KEEP, 5.0)
    policy.states.discard()
    policy.open_gate(Hold.UPDATE)
    with pytest.raises(RollwireError) as caught:
        await running
    assert caught.value.reason == Reason.NO_WEIGHTS


async def test_a_receiver_that_leaves_while_the_gate_is_shut_leaves_nothing() -> None:
    policy = policy_of(Counting())
    running = asyncio.create_task(collected(policy, request(max_tokens=1000, limit=10_000)))
    await ticks(3)
    policy.close_gate(Hold.UPDATE)
    assert await policy.make_way(Hold.UPDATE, KEEP, 5.0) == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    policy.open_gate(Hold.UPDATE)
    await ticks(3)
    assert cast(Any, policy.engine).ever == 1 and await policy.drain(0.0)
