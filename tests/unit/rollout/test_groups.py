"""Places for episodes are given back, and sessions closed, whatever goes wrong meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct

from rollwire.rollout.groups import EpisodeSlots, GroupRunner
from rollwire.rollout.sessions import SessionOpener
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import environment_pb2


class Slow:
    """Plays episodes that take long to give up."""

    async def play(self, *_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_call_that_is_cancelled_gives_its_places_back(times: int) -> None:
    slots = EpisodeSlots(5)
    plan: Any = SimpleNamespace(indices=(0, 1, 2), episode_timeout_s=None)
    runner: Any = Slow()
    playing = asyncio.create_task(anext(GroupRunner(runner, slots).play(plan, 60.0)))
    await asyncio.sleep(0)
    assert slots.taken == 3
    for _ in range(times + 1):  # the first ends the episodes, which do not end at once
        playing.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.wait([playing], timeout=30)
    assert playing.cancelled() and slots.taken == 0


async def test_a_session_that_cannot_be_closed_does_not_keep_the_others_from_it() -> None:
    closed: list[str] = []

    async def close_session(session_id: str, timeout_s: float) -> None:
        if session_id == "bad":
            raise RuntimeError("a bug")
        await asyncio.sleep(0.01)
        closed.append(session_id)

    server = SimpleNamespace(sessions=2, calls=SimpleNamespace(close_session=close_session), client=None)
    pool: Any = None
    opener = SessionOpener(pool, 1.0)
    for session_id in ("bad", "good"):
        session: Any = SimpleNamespace(server=server, start=SimpleNamespace(session_id=session_id))
        opener.close(session)
    await opener.finish()
    assert closed == ["good"] and server.sessions == 0


class SlowServer:
    """An environment server that opens a session when the test says so."""

    def __init__(self, answer: environment_pb2.OpenSessionResponse | RollwireError) -> None:
        self.answer = answer
        self.sessions = 0
        self.calls = self
        self.client = SimpleNamespace(target="h:1")
        self.asked, self.may_open = asyncio.Event(), asyncio.Event()
        self.closed: list[str] = []

    async def describe(self, tag: str) -> environment_pb2.EnvironmentDescription:
        return environment_pb2.EnvironmentDescription(tag=tag)

    async def open_session(self, request: Any, timeout_s: float) -> environment_pb2.OpenSessionResponse:
        self.asked.set()
        await self.may_open.wait()
        if isinstance(self.answer, RollwireError):
            raise self.answer
        return self.answer

    async def close_session(self, session_id: str, timeout_s: float) -> None:
        self.closed.append(session_id)


@pytest.mark.parametrize(
    ("answer", "closed"),
    [
        (environment_pb2.OpenSessionResponse(session_id="s"), ["s"]),
        (environment_pb2.OpenSessionResponse(failure=environment_pb2.EnvironmentFailure(message="no")), []),
        (RollwireError(grpc.StatusCode.UNAVAILABLE, Reason.TRANSPORT, "gone"), []),
    ],
)
async def test_a_session_that_opens_after_its_episode_was_cancelled_is_closed(answer: Any, closed: list[str]) -> None:
    server = SlowServer(answer)
    pool: Any = SimpleNamespace(by_load=lambda _: [server])
    opener = SessionOpener(pool, 60.0)
    opening = asyncio.create_task(opener.open(["h:1"], "Lake", 1, Struct()))
    await server.asked.wait()
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled() and server.sessions == 1, "it is load until it is closed"
    server.may_open.set()
    await opener.finish()
    assert server.closed == closed and server.sessions == 0


async def test_a_session_that_never_opens_does_not_keep_the_server_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollwire.rollout.sessions._FINISH_S", 0.05)
    server = SlowServer(environment_pb2.OpenSessionResponse(session_id="s"))
    pool: Any = SimpleNamespace(by_load=lambda _: [server])
    opener = SessionOpener(pool, 60.0)
    opening = asyncio.create_task(opener.open(["h:1"], "Lake", 1, Struct()))
    await server.asked.wait()
    opening.cancel()
    await asyncio.wait([opening])
    async with asyncio.timeout(30):
        await opener.finish()
    assert server.closed == [] and server.sessions == 0
