"""Pauses: the gate stays shut until whoever shut it says otherwise, or until the lease expires."""

from __future__ import annotations

import asyncio

from rollwire.rollout.policy import Hold, PauseMode, Policy
from rollwire.rollout.weights import DRAIN_S
from rollwire.serving.logs import get_logger

_log = get_logger(__name__)


class Pauser:
    """The one pause of a policy. Updates go on during a pause; what they load serves after it.

    Args:
        policy: Whose gate.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def paused(self) -> bool:
        """True while a pause lasts."""
        return Hold.PAUSE in self._policy.holds

    async def pause(self, mode: PauseMode, lease_s: float) -> int:
        """Begins or renews the pause; returns how many generations were interrupted.

        Args:
            mode: What happens to those that run.
            lease_s: The pause ends by itself after this time, counted from now.
        """
        self._policy.close_gate(Hold.PAUSE)
        self._cancel_expiry()
        self._expiry = asyncio.get_running_loop().call_later(lease_s, self._expire, lease_s)
        return await self._policy.make_way(Hold.PAUSE, mode, DRAIN_S)

    def resume(self) -> None:
        """Ends the pause; without one it does nothing."""
        self._cancel_expiry()
        self._policy.open_gate(Hold.PAUSE)

    def _expire(self, lease_s: float) -> None:
        _log.warning("the lease of a pause expired; generations start again", lease_s=lease_s)
        self.resume()

    def _cancel_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
