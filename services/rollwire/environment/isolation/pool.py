"""Which worker plays which session of a tag. Everything runs on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from rollwire.client.results import failure
from rollwire.environment.isolation.connection import WorkerConnection, WorkerEvents
from rollwire.environment.isolation.processes import Ended, WorkerProcesses
from rollwire.environment.samples import UnusableError
from rollwire.serving.logs import get_logger
from rollwire.v1 import environment_pb2 as pb

_log = get_logger(__name__)
IDLE_S: Final = 60.0
"""How long a worker without sessions waits for the next one."""

_CLOSE_TIMEOUT_S: Final = 5.0


class SeatsTakenError(Exception):
    """Every worker is full, and no further one is allowed."""


@dataclass(frozen=True)
class SeatLimits:
    """Limits of a tag.

    Attributes:
        sessions_per_process: Sessions that share a worker at once.
        max_processes: Workers at once.
        recycle_after_sessions: Sessions that a worker plays in its life; 0 is unlimited.
    """

    sessions_per_process: int
    max_processes: int
    recycle_after_sessions: int


@dataclass(eq=False)
class Worker:
    """A worker process, from the decision to start one until it is gone.

    Attributes:
        connection: Calls to it.
        number: Its number, once it was started.
        sessions: Sessions that have a seat in it.
        served: Sessions that ever had.
        retired: It gets no further sessions.
        failed: An episode in it failed.
        closing: It was told to end.
        tasks: Its start, while that is going on.
    """

    connection: WorkerConnection
    number: int | None = None
    sessions: int = 0
    served: int = 0
    retired: bool = False
    failed: bool = False
    closing: bool = False
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


@dataclass(frozen=True)
class PoolEvents:
    """What a pool reports.

    Attributes:
        learned: A worker declares how metrics are aggregated.
        failed: A worker with sessions hung, broke or died, with the failure of the session to blame.
    """

    learned: Callable[[pb.EnvironmentDescription], None]
    failed: Callable[[pb.EnvironmentFailure], None]


class WorkerPool:
    """The workers of one tag."""

    def __init__(self, tag: str, processes: WorkerProcesses, limits: SeatLimits, events: PoolEvents) -> None:
        self._tag = tag
        self._processes = processes
        self._limits = limits
        self._events = events
        self._workers: list[Worker] = []
        self._closed = False

    def seat(self) -> Worker:
        """Gives a session a seat: in a worker that has a free one, the fullest first, else in a new worker.

        Raises:
            SeatsTakenError: There is none.
        """
        free = [worker for worker in self._workers if self._has_seat(worker)]
        if free:
            worker = max(free, key=lambda worker: worker.sessions)
        elif len(self._workers) < self._limits.max_processes:
            worker = self._new()
        else:
            raise SeatsTakenError
        worker.sessions += 1
        worker.served += 1
        if worker.served == self._limits.recycle_after_sessions:
            worker.retired = True
        return worker

    def release(self, worker: Worker) -> None:
        """Takes a seat back."""
        worker.sessions -= 1
        if worker.sessions or worker.connection.lost is not None:
            return
        if worker.retired:
            self._close(worker)
        else:
            asyncio.get_running_loop().call_later(IDLE_S, self._close_if_idle, worker, worker.served)

    async def end(self) -> None:
        """Ends all workers."""
        self._closed = True
        for worker in self._workers:
            worker.closing = True
            worker.connection.lose(_lost("the server is stopping"))
        await self._processes.end()

    def _has_seat(self, worker: Worker) -> bool:
        usable = not worker.retired and not worker.closing and worker.connection.lost is None
        return usable and worker.sessions < self._limits.sessions_per_process

    def _new(self) -> Worker:
        worker: Worker

        def broken(found: pb.EnvironmentFailure) -> None:
            self._broken(worker, found)

        worker = Worker(WorkerConnection(WorkerEvents(self._events.learned, self._log_stack, broken)))
        self._workers.append(worker)
        task = asyncio.create_task(self._start(worker))
        worker.tasks.add(task)
        task.add_done_callback(worker.tasks.discard)
        return worker

    async def _start(self, worker: Worker) -> None:
        try:
            worker.number = await self._processes.start(worker.connection, partial(self._ended, worker))
        except UnusableError as error:
            self._ended(worker, Ended(f"could not be started: {error}", []))
            return
        if worker.connection.lost is not None:  # it was given up meanwhile
            self._processes.kill(worker.number)

    def _broken(self, worker: Worker, found: pb.EnvironmentFailure) -> None:
        _log.warning(
            "killing an environment's process",
            environment_tag=self._tag,
            sessions=worker.sessions,
            reason=found.message,
        )
        if worker.number is not None:
            self._processes.kill(worker.number)
        self._events.failed(found)

    def _ended(self, worker: Worker, ended: Ended) -> None:
        self._workers.remove(worker)
        unexpected = worker.connection.lost is None and not worker.closing
        found = _lost(f"its process {ended.how}")
        worker.connection.lose(found)
        if self._closed:
            return
        # What an environment printed before it failed is for its author; its stack trace is in the log already.
        expected = _log.info if worker.failed and ended.output else _log.debug
        log = expected if worker.closing else _log.warning
        log(
            "an environment's process ended",
            environment_tag=self._tag,
            how=ended.how,
            sessions=worker.sessions,
            last_output=ended.output,
        )
        if unexpected and worker.sessions:
            self._events.failed(found)

    def _close_if_idle(self, worker: Worker, served: int) -> None:
        if worker.served == served and not worker.closing and worker.connection.lost is None:
            self._close(worker)

    def _close(self, worker: Worker) -> None:
        """Lets a worker end, and kills it when it does not."""
        worker.closing = True
        worker.connection.close()
        if worker.number is not None:
            asyncio.get_running_loop().call_later(_CLOSE_TIMEOUT_S, self._processes.kill, worker.number)

    def _log_stack(self, stack: str) -> None:
        _log.warning("environment failed", environment_tag=self._tag, stack=stack)


def _lost(message: str) -> pb.EnvironmentFailure:
    return failure(pb.ENVIRONMENT_FAILURE_KIND_LOST, "Lost", message)
