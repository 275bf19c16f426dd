"""Runs the environments of one tag in worker processes. Whatever one of them does, its episodes fail and nobody else's.

A session gets a seat in a worker. A worker plays its sessions one call after another. One in which an episode failed
takes no further sessions; one that hangs is killed, with all that it started.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from rollwire.environment.health import TagHealth
from rollwire.environment.isolation.connection import Outcome
from rollwire.environment.isolation.launch import ZygoteProcess
from rollwire.environment.isolation.pool import PoolEvents, SeatLimits, SeatsTakenError, Worker, WorkerPool
from rollwire.environment.isolation.processes import WorkerProcesses
from rollwire.environment.isolation.setup import ProcessSetup
from rollwire.environment.options import OptionError
from rollwire.environment.refusals import bad_option, check_drawable, failed_drawing, refused_options
from rollwire.environment.registered import RegisteredEnvironment
from rollwire.rpc.errors import Reason, exhausted
from rollwire.v1 import environment_pb2 as pb

_RETRY_AFTER_S: Final = 1.0


@dataclass(frozen=True)
class Isolation:
    """How the environments of a tag are kept apart.

    Attributes:
        setup: What their processes are told.
        limits: How many there are.
        zygote: Their parent, ready.
    """

    setup: ProcessSetup
    limits: SeatLimits
    zygote: ZygoteProcess


@dataclass(eq=False, slots=True)
class Seat:
    """An episode.

    Attributes:
        worker: Plays it.
        name: Its session in the worker.
        max_turns: Turn limit.
        turns: Turns played.
        ended: No turn can follow.
    """

    worker: Worker
    name: str
    max_turns: int
    turns: int = 0
    ended: bool = False


class IsolatedHost:
    """Starts, plays, draws and closes the episodes of one tag; a `rollwire.environment.hosts.Host`."""

    def __init__(self, registered: RegisteredEnvironment, isolation: Isolation, disable_after_failures: int) -> None:
        """Creates the host; without a running event loop, too.

        Args:
            registered: What to run.
            isolation: Where. The zygote belongs to the host from now on.
            disable_after_failures: Episodes that fail in a row until the tag is disabled.
        """
        self.registered = registered
        self._limits = isolation.limits
        self.health = TagHealth(registered.tag, disable_after_failures)
        events = PoolEvents(lambda learned: registered.learn(learned.metric_aggregation), self.health.failed)
        processes = WorkerProcesses(isolation.setup, isolation.zygote)
        self._pool = WorkerPool(registered.tag, processes, isolation.limits, events)
        self._sessions = 0

    @property
    def description(self) -> pb.EnvironmentDescription:
        """The tag as the catalogue shows it."""
        return self.registered.description

    @property
    def disabled(self) -> bool:
        """Whether it failed too often."""
        return self.health.disabled

    async def start(self, options: Mapping[str, Any], seed: int) -> tuple[Seat | None, pb.OpenSessionResponse]:
        """Has a worker construct an environment and reset it.

        Args:
            options: Overrides from the request.
            seed: Seed of the reset.

        Returns:
            The episode and its start state; or no episode and a response with `failure` set.

        Raises:
            RollwireError: The tag is disabled, all seats are taken, or an option is not allowed.
        """
        self.health.check()
        try:
            self.registered.schema.requested(options)
        except OptionError as error:
            raise bad_option(error) from error
        worker = self._seat()
        seated = False
        try:
            self._sessions += 1
            name = str(self._sessions)
            request = pb.OpenSessionRequest(request_id=name, environment_tag=self.registered.tag, seed=seed)
            request.options.update(dict(options))
            outcome = await self._call(worker, pb.SessionCall(open=request))
            if isinstance(outcome, pb.EnvironmentFailure):
                return None, pb.OpenSessionResponse(failure=outcome)
            if outcome.HasField("error"):
                raise refused_options(options, outcome.error.message)
            if outcome.open.HasField("failure"):
                self._failed(worker, outcome.open.failure)
                return None, outcome.open
            seated = True
            return Seat(worker, name, outcome.open.max_turns), outcome.open
        finally:
            if not seated:
                self._pool.release(worker)

    def play(self, episode: Seat, action: str) -> Future[pb.StepResponse]:
        """Plays a turn; a failure is in the response."""
        played: Future[pb.StepResponse] = asyncio.get_running_loop().create_future()
        call = pb.SessionCall(step=pb.StepRequest(session_id=episode.name, turn=episode.turns, action=action))
        timeout_s = self.registered.step_timeout_s
        episode.worker.connection.call(call, timeout_s, partial(self._played, episode, played))
        return played

    def play_now(self, episode: Seat, action: str) -> None:
        """Plays nothing: every turn takes a worker."""

    async def draw(self, episode: Seat, render_format: pb.RenderFormat.ValueType) -> pb.RenderResponse:
        """Draws the current state. Raises `RollwireError` when the environment cannot."""
        check_drawable(self.description, render_format)
        request = pb.RenderRequest(session_id=episode.name, format=render_format)
        outcome = await self._call(episode.worker, pb.SessionCall(render=request))
        if isinstance(outcome, pb.EnvironmentFailure):
            raise failed_drawing(self.registered.tag, f"{outcome.type}: {outcome.message}")
        if outcome.HasField("error"):
            raise failed_drawing(self.registered.tag, outcome.error.message)
        return outcome.render

    async def close(self, episode: Seat) -> None:
        """Lets the environment free its resources, after what it is doing now, and gives its seat back."""
        request = pb.CloseSessionRequest(session_id=episode.name)
        try:
            await self._call(episode.worker, pb.SessionCall(close=request))
        finally:
            self._pool.release(episode.worker)

    async def end(self) -> None:
        """Ends all processes."""
        await self._pool.end()

    def _seat(self) -> Worker:
        try:
            return self._pool.seat()
        except SeatsTakenError:
            limits = self._limits
            raise exhausted(
                Reason.SESSIONS_EXHAUSTED,
                f"all {limits.max_processes} processes of environment {self.registered.tag} are in use, each by "
                f"{limits.sessions_per_process} sessions; close some, wait, or raise max_processes or "
                f"sessions_per_process of environment.definitions.{self.registered.tag}",
                retry_after_s=_RETRY_AFTER_S,
                environment_tag=self.registered.tag,
            ) from None

    async def _call(self, worker: Worker, call: pb.SessionCall) -> Outcome:
        answered: Future[Outcome] = asyncio.get_running_loop().create_future()

        def deliver(outcome: Outcome) -> None:
            if not answered.done():
                answered.set_result(outcome)

        worker.connection.call(call, self.registered.step_timeout_s, deliver)
        return await answered

    def _played(self, episode: Seat, played: Future[pb.StepResponse], outcome: Outcome) -> None:
        if isinstance(outcome, pb.EnvironmentFailure):  # the pool has counted it
            response = pb.StepResponse(failure=outcome)
            episode.ended = True
        elif outcome.step.HasField("failure"):
            response = outcome.step
            episode.ended = True
            self._failed(episode.worker, response.failure)
        else:
            response = outcome.step
            episode.turns += 1
            if episode.turns >= episode.max_turns and not response.terminated:
                response.truncated = True
            episode.ended = response.terminated or response.truncated
            if episode.ended:
                self.health.succeeded()
        if not played.done():  # whoever waited may have been cancelled
            played.set_result(response)

    def _failed(self, worker: Worker, found: pb.EnvironmentFailure) -> None:
        worker.failed = True
        worker.retired = True  # what raised an error may have left anything behind
        self.health.failed(found)
