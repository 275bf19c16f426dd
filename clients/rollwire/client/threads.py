"""Threads for environments that may hang. A thread that hangs cannot be stopped: it is given up, counted, and bounded.

All bookkeeping happens on the event loop; threads only run work and report back. The threads are daemons, so a hung
environment does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class WorkTimeoutError(Exception):
    """The work did not end in time; its thread is given up until it does."""


class ThreadsHungError(Exception):
    """Every thread hangs, so that nothing more can run."""


@dataclass(eq=False, slots=True)
class _Worker:
    inbox: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = field(default_factory=queue.SimpleQueue)
    hung: bool = False
    late: Callable[[Any], None] | None = None


class WorkerThreads:
    """A pool that grows on demand up to `limit` threads, hung ones included.

    Attributes:
        limit: Most threads.
        hung: Threads whose work has exceeded its time and not ended since.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.limit = limit
        self.hung = 0
        self._name = name
        self._workers = 0
        self._idle: list[_Worker] = []
        # Bounded by the callers: a session has at most one piece of work at a time.
        self._waiting: deque[asyncio.Future[_Worker]] = deque()

    async def run(self, work: Callable[[], T], timeout_s: float, late: Callable[[T | None], None] | None = None) -> T:
        """Runs `work` in a thread and returns its value.

        Args:
            work: What to run. It must turn the errors it expects into values; what it raises is raised here.
            timeout_s: Longest time from its start; waiting for a free thread does not count.
            late: Gets the value, or None for an error, of work that ends after it was given up.

        Raises:
            WorkTimeoutError: It did not end in time.
            ThreadsHungError: No thread is left.
        """
        worker = await self._acquire()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        # The caller's context goes along: log lines of the work name the service.
        worker.inbox.put((partial(copy_context().run, work), done))
        await asyncio.wait((done,), timeout=timeout_s)
        if done.done():
            return done.result()
        worker.hung, worker.late = True, late
        self.hung += 1
        self._refuse_if_all_hung()
        raise WorkTimeoutError

    async def _acquire(self) -> _Worker:
        if self._idle:
            return self._idle.pop()
        if self._workers < self.limit:
            worker = _Worker()
            loop = asyncio.get_running_loop()
            thread = threading.Thread(
                target=self._serve, args=(worker, loop), name=f"{self._name}-{self._workers}", daemon=True
            )
            thread.start()
            self._workers += 1
            return worker
        if self.hung == self.limit:
            raise ThreadsHungError
        turn: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        return await turn

    def _serve(self, worker: _Worker, loop: asyncio.AbstractEventLoop) -> None:
        """The life of a thread."""
        while True:
            work, done = worker.inbox.get()
            value, error = None, None
            try:
                value = work()
            except Exception as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(self._finished, worker, done, value, error)
            except RuntimeError:  # the loop is closed: the server has ended
                return
            del work, done, value, error  # an idle thread keeps nothing alive

    def _finished(self, worker: _Worker, done: asyncio.Future[Any], value: object, error: Exception | None) -> None:
        if worker.hung:
            late, worker.hung, worker.late = worker.late, False, None
            self.hung -= 1
            if late is not None:
                late(value)
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(worker)
                return
        self._idle.append(worker)

    def _refuse_if_all_hung(self) -> None:
        if self.hung < self.limit:
            return
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(ThreadsHungError())
