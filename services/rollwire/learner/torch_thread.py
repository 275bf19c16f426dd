"""The one thread in which a learner computes, as seen from the event loop, and what happens when a rank has failed."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from rollwire.rpc.errors import Reason, RollwireError

_P = ParamSpec("_P")
_T = TypeVar("_T")


class TorchThread:
    """Runs one function at a time. After a rank has failed, all that runs or waits ends with that error.

    The thread itself may then be stuck in a collective operation for good: the process must end without waiting for it.

    Args:
        on_failure: Called once, on the event loop, when a rank has failed.
    """

    def __init__(self, on_failure: Callable[[RollwireError], None]) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")
        self._on_failure = on_failure
        self._failed: asyncio.Future[RollwireError] | None = None

    @property
    def failed(self) -> bool:
        """True once a rank has failed."""
        return self._failed is not None and self._failed.done()

    async def run(self, function: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T:
        """Returns what the function returns. If the caller goes away, it is not begun, or else runs to its end.

        Raises:
            RollwireError: INTERNAL / `RANK_FAILED`.
        """
        failed = self._failure()
        if failed.done():
            raise failed.result()
        context = contextvars.copy_context()  # what log lines are bound to
        queued = self._executor.submit(functools.partial(context.run, function, *arguments, **named))
        work = asyncio.wrap_future(queued)
        work.add_done_callback(self._ended)
        try:
            await asyncio.wait((work, failed), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            queued.cancel()  # does nothing to what runs already
            raise
        if not work.done():
            raise failed.result()
        return work.result()

    def fail(self, error: RollwireError) -> None:
        """Ends everything with an error; called on the event loop."""
        failed = self._failure()
        if not failed.done():
            failed.set_result(error)
            self._on_failure(error)

    async def close(self) -> None:
        """Waits for the end of what runs, unless a rank has failed."""
        if self.failed:
            self._executor.shutdown(wait=False, cancel_futures=True)
        else:
            await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)

    def _ended(self, work: asyncio.Future[Any]) -> None:
        """Sees to it that the failure of a rank is noticed also where nobody waits for the work any more."""
        error = None if work.cancelled() else work.exception()
        if isinstance(error, RollwireError) and error.reason == Reason.RANK_FAILED:
            self.fail(error)

    def _failure(self) -> asyncio.Future[RollwireError]:
        if self._failed is None:
            self._failed = asyncio.get_running_loop().create_future()
        return self._failed
