"""Says when agents hold everything up: sessions without a call, while nothing else goes on. Pure: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rollwire.coordinator.wording import counted

QUIET_S: Final = 30.0
"""Time without a call or a result after which people are told; and the least time between two notices."""


@dataclass(frozen=True)
class QuietSession:
    """An open session.

    Attributes:
        tag: Its environment tag.
        idle_s: Time since its last call.
        lease_s: It ends after so long without a call.
    """

    tag: str
    idle_s: float
    lease_s: float


class QuietNotice:
    """Decides when people are told."""

    def __init__(self) -> None:
        self._told_s: float | None = None

    def look(self, now_s: float, settled_s: float | None, sessions: Sequence[QuietSession]) -> str:
        """Returns what to tell people; empty for nothing.

        Args:
            now_s: The time.
            settled_s: When an episode last got its result, on the same clock; None before the first one.
            sessions: All open sessions.
        """
        if any(last_s is not None and now_s - last_s < QUIET_S for last_s in (settled_s, self._told_s)):
            return ""
        quiet = [session for session in sessions if session.idle_s >= QUIET_S]
        parts = []
        for tag in sorted({session.tag for session in quiet}):
            own = [session for session in quiet if session.tag == tag]
            idle_s = min(session.idle_s for session in own)
            next_s = max(0.0, min(session.lease_s - session.idle_s for session in own))
            have = "has" if len(own) == 1 else "have"
            parts.append(
                f"{counted(len(own), 'session')} of {tag} {have} made no call for {idle_s:.0f} s; unless one comes, "
                f"the first is given up in {next_s:.0f} s and its episode offered again"
            )
        if parts:
            self._told_s = now_s
        return "; ".join(parts)
