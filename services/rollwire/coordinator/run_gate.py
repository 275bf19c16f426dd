"""Whether a run takes part in anything from outside: not before its weights are served, not after its last step."""

from __future__ import annotations

import asyncio
from typing import Final

import grpc

from rollwire.rpc.errors import Reason, RollwireError, precondition

STARTING_RETRY_S: Final = 1.0
"""Agents and pushers that come while the run starts may ask again after so long."""


class RunGate:
    """Opens when training begins and closes for good when it ends.

    Attributes:
        ended: Set once it is closed.
    """

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._begun = False

    def begin(self) -> None:
        """Lets agents and pushers in."""
        self._begun = True

    def end(self) -> None:
        """Lets nobody in any more."""
        self.ended.set()

    def check(self) -> None:
        """Raises `RollwireError`: `RUN_ENDED`, or `NO_WEIGHTS` before the beginning."""
        if self.ended.is_set():
            raise precondition(Reason.RUN_ENDED, "the run has ended: it takes no more episodes")
        if not self._begun:
            raise starting()


def starting() -> RollwireError:
    """Returns the error for calls that come too early."""
    return RollwireError(
        grpc.StatusCode.UNAVAILABLE,
        Reason.NO_WEIGHTS,
        "the run is starting and serves no weights yet; ask again",
        retry_after_s=STARTING_RETRY_S,
    )
