"""Playing for the tests: whole episodes, refusals, and tests written as coroutines that pytest runs without plugins."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from rollwire.client.environment import EnvironmentClient
from rollwire.client.results import MAX_METRICS, MAX_TEXT_BYTES
from rollwire.rpc.errors import RollwireError
from rollwire.rpc.ids import METRIC_PATTERN, new_id
from rollwire.v1 import environment_pb2 as pb

TEST_LIMIT_S: Final = 300.0
SuiteT = TypeVar("SuiteT")


class Calls(Protocol):
    """What plays: an `EnvironmentClient`, or a `SessionStream`."""

    async def open_session(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        """Starts a session."""

    async def step(self, session_id: str, turn: int, action: str) -> pb.StepResponse:
        """Plays a turn."""

    async def close_session(self, session_id: str) -> None:
        """Ends a session."""


@dataclass(frozen=True)
class Episode:
    """What an environment answered, from the reset on; equal episodes are equal."""

    instructions: str
    observations: tuple[str, ...]
    rewards: tuple[float, ...]
    metrics: tuple[tuple[tuple[str, float], ...], ...]
    ended: bool


def blocking(test: Callable[[SuiteT, str], Awaitable[None]]) -> Callable[[SuiteT, str], None]:
    """Makes a test of pytest from a coroutine that takes the fixture `target`."""

    @functools.wraps(test)
    def run(self: SuiteT, target: str) -> None:
        async def limited() -> None:
            async with asyncio.timeout(TEST_LIMIT_S):
                await test(self, target)

        asyncio.run(limited())

    return run


def opening(tag: str, seed: int, options: Mapping[str, Any], *, lease_s: int = 60) -> pb.OpenSessionRequest:
    """Returns a request to open a session under a new request id."""
    request = pb.OpenSessionRequest(request_id=new_id("compliance"), environment_tag=tag, seed=seed)
    request.lease.FromSeconds(lease_s)
    if options:
        request.options.update(options)
    return request


async def play(
    calls: Calls, request: pb.OpenSessionRequest, actions: Sequence[str], most_turns: int, *, repeats: int = 1
) -> Episode:
    """Plays an episode, checks each answer, and closes the session.

    Args:
        calls: Plays.
        request: Opens the session.
        actions: Played in turn, again from the start after the last one.
        most_turns: Stops after so many turns.
        repeats: How often each call is made; all answers to it must be the same.
    """
    opened = [await calls.open_session(request) for _ in range(repeats)]
    for other in opened:
        assert other == opened[0], "an opening that comes again is answered as before"
    start = opened[0]
    check_start(start)
    observations, rewards, metrics, ended = [start.observation], [], [], False
    for turn in range(min(most_turns, start.max_turns)):
        action = actions[turn % len(actions)]
        replies = [await calls.step(start.session_id, turn, action) for _ in range(repeats)]
        reply = replies[0]
        for one in replies:
            assert one == reply, f"turn {turn}, which comes again, is answered as before"
        check_reply(reply)
        observations.append(reply.observation)
        rewards.append(reply.reward)
        metrics.append(tuple(sorted(reply.metrics.items())))
        ended = reply.terminated or reply.truncated
        if ended:
            break
        assert turn + 1 < start.max_turns, "the last turn that is allowed sets truncated or terminated"
    await calls.close_session(start.session_id)
    return Episode(start.instructions, tuple(observations), tuple(rewards), tuple(metrics), ended)


def check_start(start: pb.OpenSessionResponse) -> None:
    """Asserts that a start state keeps the limits of the contract."""
    assert not start.HasField("failure"), f"the environment failed to start: {start.failure.type}: {start.failure}"
    assert start.session_id
    assert start.max_turns >= 1
    assert start.lease.ToSeconds() > 0
    for text in (start.instructions, start.observation, start.suffix):
        assert len(text.encode()) <= MAX_TEXT_BYTES
    assert len(start.observation_png) <= MAX_TEXT_BYTES


def check_reply(reply: pb.StepResponse) -> None:
    """Asserts that the outcome of a turn keeps the limits of the contract and is no failure."""
    assert not reply.HasField("failure"), f"the environment failed: {reply.failure.type}: {reply.failure.message}"
    assert math.isfinite(reply.reward)
    assert len(reply.metrics) <= MAX_METRICS
    for name, value in reply.metrics.items():
        assert METRIC_PATTERN.fullmatch(name), f"the name of the metric {name!r}"
        assert math.isfinite(value), f"the metric {name} is {value}"
    for text in (reply.observation, reply.suffix):
        assert len(text.encode()) <= MAX_TEXT_BYTES
    assert len(reply.observation_png) <= MAX_TEXT_BYTES


async def refused(call: Awaitable[Any], reason: str) -> RollwireError:
    """Asserts that a call is refused with a reason of docs/wire.md, and returns the error."""
    try:
        answer = await call
    except RollwireError as error:
        assert error.reason == reason, f"refused with {error}, but the reason must be {reason}"
        return error
    raise AssertionError(f"must be refused with {reason}, but was answered: {str(answer)[:200]}")


async def session(client: EnvironmentClient, tag: str, options: Mapping[str, Any]) -> pb.OpenSessionResponse:
    """Opens a session and checks its start."""
    start = await client.open_session(opening(tag, 1, options))
    check_start(start)
    return start
