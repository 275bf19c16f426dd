"""Says that a run waits for agents or pushers who do not come. Pure: no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

FIRST_NOTICE_S: Final = 10.0
"""Wait for somebody who never came before, after which people are told; less where the whole wait is short."""

_ASKS: Final = {"agent": "no agent has asked for {tag}", "pushed": "nothing was pushed as {tag}"}
_WHERE: Final = {"agent": "agents ask at", "pushed": "pushers send to"}


@dataclass
class _Wait:
    """One wait of a tag.

    Attributes:
        since_s: When it began.
        told: Notices given.
    """

    since_s: float
    told: int = 0


@dataclass
class WaitNotices:
    """Decides when people are told, for each tag: early on the first time, and when half of the time is over.

    Attributes:
        timeout_s: `timeouts.group_s`.
    """

    timeout_s: float
    _asked_s: dict[str, float] = field(default_factory=dict)
    _waits: dict[str, _Wait] = field(default_factory=dict)

    def asked(self, tag: str, now_s: float) -> None:
        """Notes that an agent asked, or that something was pushed: a wait begins anew."""
        self._asked_s[tag] = now_s
        self._waits.pop(tag, None)

    def look(self, tag: str, source: str, now_s: float, address: str, *, waiting: bool) -> str:
        """Returns what to tell people; empty for nothing.

        Args:
            tag: Environment tag.
            source: Who is waited for: `agent` or `pushed`.
            now_s: The time.
            address: Where the coordinator answers.
            waiting: True if nothing goes on for the tag until somebody comes.
        """
        if not waiting:
            self._waits.pop(tag, None)
            return ""
        wait = self._waits.setdefault(tag, _Wait(now_s))
        waited_s = now_s - wait.since_s
        half_s = self.timeout_s / 2
        came = tag in self._asked_s
        if waited_s >= half_s and wait.told < 2:
            wait.told = 2
        elif waited_s >= min(FIRST_NOTICE_S, half_s / 2) and wait.told < 1 and not came:
            wait.told = 1
        else:
            return ""
        since = f"for {now_s - self._asked_s[tag]:.0f} s" if came else "yet"
        return (
            f"{_ASKS[source].format(tag=tag)} {since}: waiting up to timeouts.group_s={self.timeout_s:g} s, "
            f"{waited_s:.0f} s of which are over; {_WHERE[source]} {address}"
        )
