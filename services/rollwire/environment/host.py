"""Runs the environments of one tag, with every failure as data.

Turns of built-in environments take microseconds and always end: they run on the event loop, where a hand-over to a
thread would cost more than the turn. Everything else (constructing, resetting, drawing, and whatever a custom
environment does) runs in threads of this tag with a time limit. A thread that exceeds it is given up: it cannot be
stopped, but the episode fails with TIMEOUT, and no other tag is affected, because tags do not share threads. An
environment that hangs inside native code without releasing Python's interpreter lock stops the whole server: such run
in processes of their own (`rollwire.environment.isolation`).
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from rollwire.client.closing import close_environment, closed_on_failure
from rollwire.client.drawings import draw
from rollwire.client.results import aggregations, failure, failure_of, start_response, step_response
from rollwire.client.threads import ThreadsHungError, WorkerThreads, WorkTimeoutError
from rollwire.environment.health import TagHealth
from rollwire.environment.options import OptionError
from rollwire.environment.protocol import Environment
from rollwire.environment.refusals import bad_option, check_drawable, failed_drawing, refused_options
from rollwire.environment.registered import RegisteredEnvironment
from rollwire.serving.logs import get_logger
from rollwire.v1 import environment_pb2 as pb

_log = get_logger(__name__)
THREADS_PER_TAG: Final = 64
"""Turns of a custom environment that run at once; more wait for a thread."""

CONCURRENT_DRAWINGS: Final = 2
"""Pictures take much memory while they are drawn; more of a tag wait."""

_LOGGED_FRAMES: Final = 20
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Episode:
    """An environment in use.

    Attributes:
        environment: The environment, reset.
        max_turns: Turn limit.
        turns: Turns played.
        ended: No turn can follow.
        lock: Held while a thread uses the environment: its calls never overlap.
        lost: Why the environment must not be touched again, once a thread hangs in it.
    """

    environment: Environment
    max_turns: int
    turns: int = 0
    ended: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    lost: pb.EnvironmentFailure | None = None


class EnvironmentHost:
    """Starts, plays, draws and closes the episodes of one tag, and counts their failures."""

    def __init__(self, registered: RegisteredEnvironment, disable_after_failures: int) -> None:
        """Creates the host.

        Args:
            registered: What to run.
            disable_after_failures: Episodes that fail in a row until the tag is disabled.
        """
        self.registered = registered
        self.health = TagHealth(registered.tag, disable_after_failures)
        self._on_loop = registered.built_in
        self._known_modes: object = None
        self._drawings = asyncio.Semaphore(CONCURRENT_DRAWINGS)
        self._closing: set[asyncio.Task[Any]] = set()
        self._threads = WorkerThreads(f"environment-{registered.tag}", THREADS_PER_TAG)

    @property
    def description(self) -> pb.EnvironmentDescription:
        """The tag as the catalogue shows it."""
        return self.registered.description

    @property
    def disabled(self) -> bool:
        """Whether it failed too often."""
        return self.health.disabled

    async def start(self, options: Mapping[str, Any], seed: int) -> tuple[Episode | None, pb.OpenSessionResponse]:
        """Constructs an environment and resets it.

        Args:
            options: Overrides from the request.
            seed: Seed of the reset.

        Returns:
            The episode and its start state; or no episode and a response with `failure` set.

        Raises:
            RollwireError: The tag is disabled, or an option is not allowed.
        """
        self.health.check()
        try:
            overrides = self.registered.schema.requested(options)
        except OptionError as error:
            raise bad_option(error) from error
        result = await self._in_thread(lambda: self._start(overrides, seed), late=self._close_late_start)
        if isinstance(result, _Rejected):
            raise refused_options(overrides, result.reason)
        if isinstance(result, pb.EnvironmentFailure):
            self.health.failed(result)
            return None, pb.OpenSessionResponse(failure=result)
        return result

    def _start(self, overrides: dict[str, Any], seed: int) -> tuple[Episode, pb.OpenSessionResponse] | _Rejected:
        try:
            environment = self.registered.factory(**{**self.registered.options, **overrides})
        except (ValueError, TypeError) as error:
            if overrides:  # the caller's mistake must not disable the tag for others
                return _Rejected(failure_of(error).message)
            raise
        with closed_on_failure(environment):
            response = start_response(environment.reset(seed), environment.max_turns)
        return Episode(environment, response.max_turns), response

    async def play(self, episode: Episode, action: str) -> pb.StepResponse:
        """Plays a turn; a failure is in the response."""
        async with episode.lock:
            result: pb.StepResponse | pb.EnvironmentFailure | None = episode.lost
            if result is None:
                result = await self._in_thread(lambda: self._step(episode, action), episode, self._close_late(episode))
        if isinstance(result, pb.EnvironmentFailure):
            return self._failed_turn(episode, result)
        return self._ended_turn(episode, result)

    def play_now(self, episode: Episode, action: str) -> pb.StepResponse | None:
        """Plays a turn on the event loop if the environment is built in and idle; else returns None."""
        if not self._on_loop or episode.lost is not None or episode.lock.locked():
            return None
        try:
            response = self._step(episode, action)
        except Exception as error:
            return self._failed_turn(episode, self._failed(error))
        return self._ended_turn(episode, response)

    def _step(self, episode: Episode, action: str) -> pb.StepResponse:
        """Plays a turn; changes nothing of the episode, because a thread that is given up goes on in here."""
        reply = episode.environment.step(action)
        response = step_response(reply)
        modes = reply[4].get("metrics_agg_mode")
        if modes and modes != self._known_modes:
            self._learn_aggregation(modes)
        return response

    def _ended_turn(self, episode: Episode, response: pb.StepResponse) -> pb.StepResponse:
        episode.turns += 1
        if episode.turns >= episode.max_turns and not response.terminated:
            response.truncated = True
        if response.terminated or response.truncated:
            episode.ended = True
            self.health.succeeded()
        return response

    def _failed_turn(self, episode: Episode, found: pb.EnvironmentFailure) -> pb.StepResponse:
        episode.ended = True
        self.health.failed(found)
        return pb.StepResponse(failure=found)

    async def draw(self, episode: Episode, render_format: pb.RenderFormat.ValueType) -> pb.RenderResponse:
        """Draws the current state.

        Raises:
            RollwireError: The environment cannot draw itself in this format.
        """
        check_drawable(self.description, render_format)
        async with self._drawings, episode.lock:
            result: pb.RenderResponse | pb.EnvironmentFailure | None = episode.lost
            if result is None:
                work = partial(draw, episode.environment, render_format)
                result = await self._in_thread(work, episode, self._close_late(episode))
        if isinstance(result, pb.EnvironmentFailure):
            raise failed_drawing(self.registered.tag, f"{result.type}: {result.message}")
        return result

    async def close(self, episode: Episode) -> None:
        """Lets the environment free its resources, after what it is doing now. Failures are only logged."""
        if callable(getattr(episode.environment, "close", None)):
            async with episode.lock:
                if episode.lost is None:
                    await self._in_thread(lambda: close_environment(episode.environment), episode)

    def _close_late(self, episode: Episode) -> Callable[[object], None]:
        """Returns what closes an episode that was given up, once no thread is in its environment any more."""

        def close(_: object) -> None:
            task = asyncio.create_task(self._in_thread(lambda: close_environment(episode.environment)))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

        return close

    def _close_late_start(self, started: object) -> None:
        if isinstance(started, tuple):
            self._close_late(started[0])(None)

    async def _in_thread(
        self, work: Callable[[], T], episode: Episode | None = None, late: Callable[[Any], None] | None = None
    ) -> T | pb.EnvironmentFailure:
        """Runs work in a thread of this tag; whatever goes wrong is returned as a failure."""

        def guarded() -> T | pb.EnvironmentFailure:
            try:
                return work()
            except BaseException as error:  # an environment may raise anything, SystemExit too
                return self._failed(error)

        timeout_s = self.registered.step_timeout_s
        try:
            return await self._threads.run(guarded, timeout_s, late)
        except WorkTimeoutError:
            message = f"no answer within {timeout_s:g} s"
        except ThreadsHungError:
            message = f"all {THREADS_PER_TAG} threads of this environment hang; restart the server"
        found = failure(pb.ENVIRONMENT_FAILURE_KIND_TIMEOUT, "Timeout", message)
        if episode is not None:
            episode.lost = found
        _log.warning(
            "environment hangs", environment_tag=self.registered.tag, hung_threads=self._threads.hung, message=message
        )
        return found

    def _failed(self, error: BaseException) -> pb.EnvironmentFailure:
        # As text: rendering a traceback with its local variables takes longer than many a turn may.
        stack = "".join(traceback.format_exception(error, limit=-_LOGGED_FRAMES))
        _log.warning("environment failed", environment_tag=self.registered.tag, stack=stack)
        return failure_of(error)

    def _learn_aggregation(self, modes: Any) -> None:
        self.registered.learn(aggregations(modes))
        self._known_modes = dict(modes)


@dataclass(frozen=True)
class _Rejected:
    """The constructor refused options of the request."""

    reason: str
