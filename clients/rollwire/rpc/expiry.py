"""Deadlines of many calls at the cost of one timer: most calls are answered long before theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


class Expiry(Generic[KeyT]):
    """Keys with deadlines; needs a running loop once something is added.

    The timer stays where it is when a key is discarded; at worst it wakes up for nothing and finds the next deadline.

    Args:
        expired: Called for each key whose deadline has passed; the key is gone by then.
    """

    def __init__(self, expired: Callable[[KeyT], None]) -> None:
        self._expired = expired
        self._deadlines_s: dict[KeyT, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, key: KeyT, deadline_s: float) -> None:
        """Adds or moves a deadline, on the clock of the running loop."""
        self._deadlines_s[key] = deadline_s
        if self._timer is None:
            self._arm(deadline_s)
        elif deadline_s < self._timer.when():
            self._timer.cancel()
            self._arm(deadline_s)

    def discard(self, key: KeyT) -> None:
        """Forgets a key, if it is known."""
        self._deadlines_s.pop(key, None)

    def clear(self) -> None:
        """Forgets everything."""
        self._deadlines_s.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, deadline_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(deadline_s, self._wake)

    def _wake(self) -> None:
        # The loop may call a little early, by the resolution of its clock: those due by the timer's own time are due.
        assert self._timer is not None, "cleared timers are cancelled"
        now_s = max(self._timer.when(), asyncio.get_running_loop().time())
        self._timer = None
        due = [key for key, deadline_s in self._deadlines_s.items() if deadline_s <= now_s]
        for key in due:
            del self._deadlines_s[key]
        if self._deadlines_s:
            self._arm(min(self._deadlines_s.values()))
        for key in due:
            self._expired(key)
