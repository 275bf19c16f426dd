"""How long clients of a run wait for it: while it starts, while it has nothing to do, while it cannot be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import grpc

from rollwire.rpc.errors import Reason, RollwireError

DEFAULT_RETRY_S: Final = 1.0
LOST_RETRY_S: Final = 0.5
# gRPC gives INTERNAL to a stream whose connection breaks in the middle of a write.
_LOST: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
)
_Result = TypeVar("_Result")


class RunEndedError(Exception):
    """The run has ended: it trains no more episodes."""


class Patience:
    """Repeats calls that are safe to repeat.

    Args:
        wait_s: Longest time in which the run answers that it is starting, full, or has nothing to do.
        lost_s: Longest time in which it cannot be reached.
    """

    def __init__(self, wait_s: float, lost_s: float) -> None:
        self.wait_s = wait_s
        self.lost_s = lost_s

    async def call(self, ask: Callable[[], Awaitable[_Result]]) -> _Result:
        """Returns the answer of a call, made again until there is one.

        Raises:
            RunEndedError: The run has ended.
            RollwireError: Any other refusal, or the last one when the time is over.
        """
        loop = asyncio.get_running_loop()
        waiting_until, lost_until = loop.time() + self.wait_s, None
        while True:
            try:
                return await ask()
            except RollwireError as error:
                check_ended(error)
                delay_s = error.retry_after_s or DEFAULT_RETRY_S
                if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED or error.reason == Reason.NO_WEIGHTS:
                    lost_until, until = None, waiting_until
                elif is_lost(error):
                    lost_until = until = loop.time() + self.lost_s if lost_until is None else lost_until
                    delay_s = LOST_RETRY_S
                else:
                    raise
                if loop.time() + delay_s > until:
                    raise
            await asyncio.sleep(delay_s)


def check_ended(error: RollwireError) -> None:
    """Raises `RunEndedError` when an error says that the run is over; a coordinator shuts down with its run."""
    if error.reason in (Reason.RUN_ENDED, Reason.DRAINING):
        raise RunEndedError(error.message) from error


def is_lost(error: RollwireError) -> bool:
    """Tells whether an error says that the run could not be reached."""
    return error.code in _LOST and error.reason == Reason.TRANSPORT
