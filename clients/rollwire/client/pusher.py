"""`TrajectoryPusher`: brings finished trajectories to a run, each exactly once, whatever happens to the connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from contextlib import aclosing
from types import TracebackType
from typing import Final, Self

import grpc

from rollwire.client.coordinator import CoordinatorClient
from rollwire.client.patience import LOST_RETRY_S, Patience, check_ended, is_lost
from rollwire.rpc.errors import RollwireError
from rollwire.v1 import coordinator_pb2, trajectory_pb2

MAX_UNANSWERED: Final = 16
"""Trajectories that are sent before the first of them must be answered."""

Trajectories = AsyncIterable[trajectory_pb2.Trajectory] | Iterable[trajectory_pb2.Trajectory]


class _Outbox:
    """Trajectories on their way: read from the user once, kept until they are answered, sent again if need be.

    Every connection goes through them by itself, from the oldest one without an answer: a broken connection that still
    waits for something to send takes nothing away from the next one.

    Attributes:
        unanswered: What was read and has no answer, oldest first; at most `MAX_UNANSWERED`.
        error: What the user's iterator raised.
    """

    def __init__(self, trajectories: Trajectories) -> None:
        self.unanswered: deque[trajectory_pb2.Trajectory] = deque()
        self.error: Exception | None = None
        self._answered = 0
        self._all_read = False
        self._room = asyncio.Semaphore(MAX_UNANSWERED)
        self._news = asyncio.Event()
        self._reading = asyncio.get_running_loop().create_task(self._read(trajectories))

    @property
    def done(self) -> bool:
        """True if there is nothing left to send or to be answered."""
        return self._all_read and not self.unanswered

    async def requests(self) -> AsyncIterator[coordinator_pb2.SubmitTrajectoriesRequest]:
        """Yields what has no answer, then what is new, for one connection."""
        following = self._answered  # how many came before the next one to send
        while True:
            place = following - self._answered
            if place < len(self.unanswered):
                following += 1
                yield coordinator_pb2.SubmitTrajectoriesRequest(trajectory=self.unanswered[max(place, 0)])
            elif self._all_read:
                return
            else:
                await self._news.wait()

    def answered(self) -> None:
        """Forgets the oldest one."""
        self.unanswered.popleft()
        self._answered += 1
        self._room.release()

    async def close(self) -> None:
        """Reads no more."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _read(self, trajectories: Trajectories) -> None:
        try:
            async with aclosing(_iterate(trajectories)) as items:
                async for item in items:
                    await self._room.acquire()
                    self.unanswered.append(item)
                    self._tell()
        except Exception as error:  # raised again by `submit`, after what came before is answered
            self.error = error
        self._all_read = True
        self._tell()


class TrajectoryPusher:
    """Pushes trajectories; use as an async context manager.

    Args:
        target: `host:port` of the coordinator.
        environment_tag: Tag of an entry of the run with `source: pushed`.
        wait_s: Longest time to wait while the run is starting.
        lost_s: Longest time in which the coordinator cannot be reached.
    """

    def __init__(self, target: str, environment_tag: str, *, wait_s: float = 3600.0, lost_s: float = 60.0) -> None:
        self.environment_tag = environment_tag
        self._client = CoordinatorClient(target)
        self._patience = Patience(wait_s, lost_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def terms(self) -> coordinator_pb2.GetSubmissionTermsResponse:
        """Returns what trajectories must look like now, and how many groups are wanted.

        Raises:
            RunEndedError: The run has ended.
            RollwireError: It refuses, or cannot be reached.
        """
        return await self._patience.call(lambda: self._client.get_submission_terms(self.environment_tag))

    async def wait_wanted(self, poll_s: float = 0.2) -> coordinator_pb2.GetSubmissionTermsResponse:
        """Waits until the run wants groups, and returns its terms. Raises as `terms` does."""
        while True:
            terms = await self.terms()
            if terms.groups_wanted:
                return terms
            await asyncio.sleep(poll_s)

    async def submit(self, trajectories: Trajectories) -> AsyncIterator[coordinator_pb2.SubmitTrajectoriesResponse]:
        """Pushes trajectories and yields the fate of each, in order.

        After a broken connection what was not answered is sent again; it may then come back as DUPLICATE, which means
        that it was accepted. Send the episodes of a group together: the run reads on only while it has room.

        Args:
            trajectories: What to push; an iterator that waits may go on as long as the run.

        Raises:
            RunEndedError: The run has ended.
            RollwireError: It refuses, or cannot be reached.
            Exception: What `trajectories` raises, after everything before is answered.
        """
        loop, outbox = asyncio.get_running_loop(), _Outbox(trajectories)
        lost_since: float | None = None
        try:
            while not outbox.done:
                try:
                    async with aclosing(self._answers(outbox)) as answers:
                        async for answer in answers:
                            lost_since = None
                            outbox.answered()
                            yield answer
                except RollwireError as error:
                    check_ended(error)
                    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:  # of the stream, which may have been idle
                        continue
                    lost_since = loop.time() if lost_since is None else lost_since
                    if not is_lost(error) or loop.time() - lost_since > self._patience.lost_s:
                        raise
                    await asyncio.sleep(LOST_RETRY_S)
            if outbox.error is not None:
                raise outbox.error
        finally:
            await outbox.close()

    async def submit_all(self, trajectories: Trajectories) -> list[coordinator_pb2.SubmitTrajectoriesResponse]:
        """Pushes trajectories and returns the fate of each, in order. Raises as `submit` does."""
        return [answer async for answer in self.submit(trajectories)]

    async def _answers(self, outbox: _Outbox) -> AsyncGenerator[coordinator_pb2.SubmitTrajectoriesResponse, None]:
        await self.terms()  # waits while the run is starting
        async for answer in self._client.submit_trajectories(outbox.requests()):
            yield answer


async def _iterate(trajectories: Trajectories) -> AsyncGenerator[trajectory_pb2.Trajectory, None]:
    if isinstance(trajectories, AsyncIterable):
        async for item in trajectories:
            yield item
    else:
        for item in trajectories:
            yield item
