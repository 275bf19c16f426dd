"""Deadlines of many calls on one timer of a loop whose time a test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.rpc.expiry import Expiry


class _Loop(asyncio.SelectorEventLoop):
    """A loop that jumps to its next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def timers(self) -> list[asyncio.TimerHandle]:
        return [timer for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]

    async def advance(self, to_s: float) -> None:
        while due := [timer.when() for timer in self.timers() if timer.when() <= to_s]:
            self.now_s = max(self.now_s, min(due))
            for _ in range(2):  # one turn finds what is due, and this may continue before it is called
                await asyncio.sleep(0)
        self.now_s = to_s


@pytest.fixture
def loop() -> Iterator[_Loop]:
    made = _Loop()
    yield made
    made.close()


@given(
    deadlines=st.lists(st.integers(1, 20), max_size=12),
    discarded=st.sets(st.integers(0, 11)),
    moments=st.lists(st.integers(0, 25), max_size=6).map(sorted),
)
def test_each_key_expires_at_its_time_unless_it_was_discarded(
    deadlines: list[int], discarded: set[int], moments: list[int]
) -> None:
    loop = _Loop()
    seen: dict[int, float] = {}
    expiry: Expiry[int] = Expiry(lambda key: seen.__setitem__(key, loop.time()))

    async def run() -> None:
        for key, deadline_s in enumerate(deadlines):
            expiry.add(key, float(deadline_s))
            assert len(loop.timers()) == 1
        for key in discarded:
            expiry.discard(key)
        for moment in moments:
            await loop.advance(float(moment))
            kept = {key: at for key, at in enumerate(deadlines) if key not in discarded and at <= moment}
            assert seen == kept

    loop.run_until_complete(run())
    loop.close()


def test_clearing_stops_the_timer(loop: _Loop) -> None:
    seen: list[str] = []
    expiry: Expiry[str] = Expiry(seen.append)

    async def run() -> None:
        expiry.add("a", 1.0)
        expiry.clear()
        expiry.clear()
        assert not loop.timers()
        await loop.advance(5.0)
        expiry.add("b", 6.0)
        await loop.advance(7.0)

    loop.run_until_complete(run())
    assert seen == ["b"]


def test_what_expires_may_add_and_clear(loop: _Loop) -> None:
    seen: list[str] = []

    def expired(key: str) -> None:
        seen.append(key)
        if key == "a":
            expiry.add("again", 3.0)
        if key == "again":
            expiry.clear()

    expiry: Expiry[str] = Expiry(expired)

    async def run() -> None:
        expiry.add("a", 1.0)
        expiry.add("never", 9.0)
        await loop.advance(20.0)

    loop.run_until_complete(run())
    assert seen == ["a", "again"]
