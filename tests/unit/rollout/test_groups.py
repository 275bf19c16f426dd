"""Places for episodes are given back, and sessions closed, whatever goes wrong meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollwire.rollout.groups import EpisodeSlots, GroupRunner
from rollwire.rollout.sessions import SessionOpener


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
