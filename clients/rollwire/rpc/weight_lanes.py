"""Worker threads for work that releases the interpreter lock: hashing, copying, comparing.

A lane runs its jobs one after the other, so a tensor whose jobs all go to one lane is hashed in order; different
tensors run on different lanes at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import Any, Final, Self

INLINE_BYTES: Final = 1 << 16
"""Tensors below this size are worked on by the caller: handing them over would cost more."""


def default_threads() -> int:
    """Returns how many lanes a transfer uses: one for each core that this process may use, at most 4."""
    return min(4, len(os.sched_getaffinity(0)))


class Lane:
    """Runs jobs in order; the first exception is kept and the jobs after it are dropped.

    Args:
        executor: Runs the jobs, one at a time; None runs them in the caller.
        pending: Most jobs waiting before `submit` blocks; None for no limit.
    """

    def __init__(self, executor: ThreadPoolExecutor | None, pending: int | None) -> None:
        self.assigned_bytes = 0
        self.error: BaseException | None = None
        self._executor = executor
        self._slots = BoundedSemaphore(pending) if pending is not None else None

    def submit(self, job: Callable[..., object], *arguments: Any) -> None:
        """Runs a job after those submitted before."""
        if self._executor is None:
            self._run(job, arguments)
            return
        if self._slots is not None:
            self._slots.acquire()
        self._executor.submit(self._run_and_free, job, arguments)

    def _run_and_free(self, job: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        try:
            self._run(job, arguments)
        finally:
            if self._slots is not None:
                self._slots.release()

    def _run(self, job: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        if self.error is None:
            try:
                job(*arguments)
            except BaseException as error:
                self.error = error


class Lanes:
    """A fixed number of lanes. Leaving the context waits for the jobs and ends the threads.

    Args:
        threads: Number of lanes beside the caller's own.
        pending: Most jobs waiting in one lane before `submit` blocks; None for no limit.
    """

    def __init__(self, threads: int, pending: int | None = None) -> None:
        self._inline = Lane(None, None)
        self._executors = [ThreadPoolExecutor(1, "weights") for _ in range(threads)]
        self._lanes = [Lane(executor, pending) for executor in self._executors]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lane(self, size_bytes: int) -> Lane:
        """Returns the lane for a tensor: the one with the fewest bytes so far, the caller's own for a small tensor."""
        if size_bytes < INLINE_BYTES or not self._lanes:
            return self._inline
        lane = min(self._lanes, key=lambda lane: lane.assigned_bytes)
        lane.assigned_bytes += size_bytes
        return lane

    def join(self) -> None:
        """Waits for all jobs, ends the threads and raises the first error of a job."""
        for executor in self._executors:
            executor.shutdown(wait=True)
        self.check()

    def check(self) -> None:
        """Raises the first error of a job that has ended, if there is one."""
        for lane in (self._inline, *self._lanes):
            if lane.error is not None:
                raise lane.error

    def close(self) -> None:
        """Drops the jobs that have not begun, waits for the others and ends the threads."""
        for executor in self._executors:
            executor.shutdown(wait=True, cancel_futures=True)
