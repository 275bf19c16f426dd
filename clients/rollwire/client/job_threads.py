"""Threads for the environments of a provider: one does all the work while it is fast, more come when it blocks.

Waking a thread costs more than many a turn takes. So a job wakes a thread only when none is at work; the thread takes
one job after the other. Jobs that still wait a moment later have got a thread that blocks before them: then more
threads are woken, up to the limit. Threads are daemons: an environment that hangs does not keep the process from
ending.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rollwire.client.threads import ThreadsHungError, WorkTimeoutError
from rollwire.rpc.expiry import Expiry

_PATIENCE_S: Final = 0.001
"""Jobs wait this long for a thread that is at work already before another one is woken."""


@dataclass(eq=False, slots=True)
class _Job:
    """Work, and who takes its value or its error.

    Attributes:
        started: A thread is at it.
        given_up: Its time is over.
        hangs: It had started when its time was over, and has not ended since.
        late: Who is told once nothing uses the environment any more after it was given up.
    """

    work: Callable[[], Any]
    done: Callable[[Any, BaseException | None], None]
    late: Callable[[Any], None] | None = None
    started: bool = False
    given_up: bool = False
    hangs: bool = False
    value: Any = None
    error: BaseException | None = None


class JobThreads:
    """A pool that grows up to `limit` threads, those that hang included. All methods are for the event loop.

    Attributes:
        limit: Most threads.
        hung: Threads whose job has exceeded its time and not ended since.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.limit = limit
        self.hung = 0
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._expiry: Expiry[_Job] = Expiry(self._expired)
        # Bounded by the sessions: each has few jobs at a time.
        self._jobs: deque[_Job] = deque()
        self._finished: deque[_Job] = deque()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._at_work = 0  # woken ones included
        self._collecting = False
        self._looking = False

    def submit(
        self,
        work: Callable[[], Any],
        timeout_s: float,
        done: Callable[[Any, BaseException | None], None],
        late: Callable[[Any], None] | None = None,
    ) -> None:
        """Runs `work` in a thread; calls `done` with its value or its error, on the event loop.

        Args:
            work: What to run.
            timeout_s: After this `done` gets a `WorkTimeoutError`; the thread is given up until the work ends.
            done: Called once; at once, with a `ThreadsHungError`, when every thread hangs.
            late: Called after the `WorkTimeoutError`, once the work has ended or is certain not to begin: with its
                value, or None.
        """
        if self.hung >= self.limit:
            done(None, ThreadsHungError())
            return
        loop = self._loop = asyncio.get_running_loop()
        job = _Job(work, done, late)
        self._jobs.append(job)
        self._expiry.add(job, loop.time() + timeout_s)
        if self._at_work <= self.hung:
            self._wake(1)
        if not self._looking:
            self._looking = True
            loop.call_later(_PATIENCE_S, self._look)

    async def run(self, work: Callable[[], Any], timeout_s: float, late: Callable[[Any], None] | None = None) -> Any:
        """Runs `work` in a thread and returns its value; raises what it raises, or as `submit` says."""
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def done(value: Any, error: BaseException | None) -> None:
            if outcome.done():
                return
            if error is None:
                outcome.set_result(value)
            else:
                outcome.set_exception(error)

        self.submit(work, timeout_s, done, late)
        return await outcome

    def _look(self) -> None:
        """Wakes more threads if jobs still wait: those at work are blocked."""
        self._looking = False
        waiting = len(self._jobs)
        if waiting:
            # Not all at once: a thread that was only slow to get the interpreter may still do them all.
            self._wake(min(waiting, max(self._at_work, 1)))
            self._looking = True
            assert self._loop is not None, "set before the first job"
            self._loop.call_later(_PATIENCE_S, self._look)

    def _wake(self, wanted: int) -> None:
        with self._lock:
            count = min(wanted, self.limit - self._at_work)
            self._at_work += max(count, 0)
            missing = self._at_work - self._threads
        for _ in range(missing):
            threading.Thread(target=self._serve, name=f"{self._name}-{self._threads}", daemon=True).start()
            self._threads += 1
        for _ in range(count):
            self._wakes.put(None)

    def _serve(self) -> None:
        """The life of a thread."""
        while True:
            self._wakes.get()
            while True:
                try:
                    job = self._jobs.popleft()
                except IndexError:
                    break
                self._do(job)
                del job  # an idle thread keeps nothing alive
            with self._lock:
                self._at_work -= 1

    def _do(self, job: _Job) -> None:
        with self._lock:
            if job.given_up:
                return
            job.started = True
        try:
            job.value = job.work()
        except BaseException as error:
            job.error = error
        self._finished.append(job)
        if not self._collecting:
            self._collecting = True
            try:
                assert self._loop is not None, "set before the first job"
                self._loop.call_soon_threadsafe(self._collect)
            except RuntimeError:  # the loop is closed: the provider has ended
                pass

    def _collect(self) -> None:
        """Hands over what threads have finished."""
        self._collecting = False  # first: what is finished from here on is collected again
        while self._finished:
            job = self._finished.popleft()
            if job.given_up:
                self.hung -= job.hangs
                if job.late is not None:
                    job.late(job.value)
            else:
                self._expiry.discard(job)
                job.done(job.value, job.error)

    def _expired(self, job: _Job) -> None:
        with self._lock:
            job.given_up = True
            job.hangs = job.started
        self.hung += job.hangs
        job.done(None, WorkTimeoutError())
        if not job.hangs and job.late is not None:
            job.late(None)
