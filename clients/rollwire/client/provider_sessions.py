"""The sessions of a provider: calls in, replies out; the user's code runs in threads.

The rules are those of a server's sessions: opening is idempotent by request id and a turn by its number, so that a call
that comes again after a cut is answered as before. The environment server keeps the leases and closes sessions; when it
cannot be reached for as long as it keeps this provider's sessions, they are closed here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from rollwire.client.closing import close_environment
from rollwire.client.drawings import draw
from rollwire.client.job_threads import JobThreads
from rollwire.client.provided import ProvidedEnvironment, play_turn
from rollwire.client.results import failure, failure_of
from rollwire.client.session_errors import refusal
from rollwire.client.sessions import (
    Admission,
    CapacityReachedError,
    Session,
    SessionError,
    SessionTable,
)
from rollwire.client.threads import ThreadsHungError, WorkTimeoutError
from rollwire.rpc.call_errors import to_call_error
from rollwire.rpc.errors import Reason, RollwireError, exhausted, invalid_field, not_found, precondition
from rollwire.v1 import environment_pb2 as pb

_log = logging.getLogger("rollwire.provider")
_LEASE_S: Final = float("inf")
"""Sessions end when the server closes them or is gone for too long, not by a clock of their own."""

_RETRY_AFTER_S: Final = 1.0
_CLOSE_TIMEOUT_S: Final = 30.0
T = TypeVar("T")


@dataclass(eq=False)
class _Game:
    """An environment in use.

    Attributes:
        environment: The environment, reset.
        response: Its start state.
        turns: Turns played.
        hung: Why it must not be touched again, once it hangs.
        turn: The turn that a thread is playing, if one is.
        lock: Held by whatever else uses it, and by turns that have to wait for that.
    """

    environment: Any
    response: pb.OpenSessionResponse
    turns: int = 0
    hung: pb.EnvironmentFailure | None = None
    turn: asyncio.Future[pb.StepResponse] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


_Session = Session[_Game, pb.StepResponse]


class ProviderSessions:
    """Answers the calls of an environment server.

    Args:
        environments: What is served, by tag.
        capacity: Sessions at once, and threads.
    """

    def __init__(self, environments: Mapping[str, ProvidedEnvironment], capacity: int) -> None:
        self._environments = environments
        self._table: SessionTable[_Game, pb.StepResponse] = SessionTable(capacity, time.monotonic)
        self._threads = JobThreads("environment", capacity)
        self._under_way: dict[_Session, asyncio.Future[Any]] = {}
        self._closing: set[asyncio.Task[Any]] = set()
        self._failed_openings: dict[str, pb.OpenSessionResponse] = {}

    def __len__(self) -> int:
        return len(self._table)

    @property
    def session_ids(self) -> list[str]:
        """Sessions that have been opened."""
        return self._table.session_ids

    @property
    def hung_threads(self) -> int:
        """Threads in which an environment hangs: so many sessions fewer can be served."""
        return self._threads.hung

    async def answer(self, call: pb.SessionCall) -> pb.SessionReply:
        """Answers one call; what goes wrong is in the reply."""
        kind = call.WhichOneof("call")
        timeout_s = call.timeout.ToNanoseconds() / 1e9
        handlers: dict[str | None, Callable[[Any, float], Awaitable[Any]]] = {
            "open": self._open,
            "step": self._step,
            "render": self._render,
            "renew": self._renew,
            "close": self._close,
        }
        try:
            if kind not in handlers:
                raise invalid_field("call", kind, "open, step, renew, close or render")
            answer = await handlers[kind](getattr(call, kind or ""), timeout_s)
        except RollwireError as error:
            return pb.SessionReply(call_id=call.call_id, error=to_call_error(error))
        return pb.SessionReply(call_id=call.call_id, **{str(kind): answer})

    def close_all(self) -> None:
        """Ends all sessions."""
        self._dispose(*self._table.close_all())

    async def closed(self) -> None:
        """Waits until environments that are being closed have been, and those that were just being started."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                while pending := {*self._closing, *self._under_way.values()}:
                    await asyncio.wait(pending)

    async def _open(self, request: pb.OpenSessionRequest, timeout_s: float) -> pb.OpenSessionResponse:
        environment = self._environments.get(request.environment_tag)
        if environment is None:
            raise not_found(Reason.UNKNOWN_ENVIRONMENT, f"this provider does not serve {request.environment_tag!r}")
        if request.request_id in self._failed_openings:
            return self._failed_openings[request.request_id]
        options = environment.check_options(request)
        try:
            admission, session = self._table.open(request.request_id, b"", _LEASE_S)
        except CapacityReachedError as error:
            raise exhausted(
                Reason.SESSIONS_EXHAUSTED,
                f"all {self._table.capacity} sessions of this provider are in use",
                retry_after_s=_RETRY_AFTER_S,
            ) from error
        if admission is Admission.REPEAT and session.opened is not None:
            return session.opened.response
        if admission is Admission.RUN:
            self._run(session, self._start(session, environment, options, request.seed, timeout_s))
        response: pb.OpenSessionResponse = await asyncio.shield(self._under_way[session])
        return response

    async def _start(
        self,
        session: _Session,
        environment: ProvidedEnvironment,
        options: Mapping[str, Any],
        seed: int,
        timeout_s: float,
    ) -> pb.OpenSessionResponse:
        try:
            started = await self._in_thread(
                lambda: environment.start(options, seed), timeout_s, RollwireError, late=self._close_late_start
            )
        except BaseException:
            self._table.forget(session)
            raise
        if isinstance(started, pb.EnvironmentFailure):
            self._table.forget(session)
            return self._failed_opening(session.request_id, started)
        game, response = started
        response.session_id = session.session_id
        opened = _Game(game, response)
        self._table.started(session, opened)
        if session.closed:
            self._dispose(session)
        return response

    def _failed_opening(self, request_id: str, found: pb.EnvironmentFailure) -> pb.OpenSessionResponse:
        """Remembers the latest failures, because the same call may come again."""
        response = pb.OpenSessionResponse(failure=found)
        self._failed_openings[request_id] = response
        if len(self._failed_openings) > self._table.capacity:
            del self._failed_openings[next(iter(self._failed_openings))]
        return response

    async def _step(self, request: pb.StepRequest, timeout_s: float) -> pb.StepResponse:
        try:
            admission, session = self._table.begin_turn(request.session_id, request.turn)
        except SessionError as error:
            raise refusal(error, request.turn) from error
        if admission is Admission.RUN and session.opened is not None:
            game = session.opened
            if game.lock.locked() or game.hung is not None:
                self._run(session, self._play_later(session, game, request.action, timeout_s))
            else:
                self._play(session, game, request.action, timeout_s)
        if session.reply is not None:  # played before; or every thread hangs, and it has failed at once
            return session.reply
        response: pb.StepResponse = await asyncio.shield(self._under_way[session])
        return response

    def _play(self, session: _Session, game: _Game, action: str, timeout_s: float) -> None:
        """Has a thread play a turn; most turns come through here, so no task is made."""
        outcome: asyncio.Future[pb.StepResponse] = asyncio.get_running_loop().create_future()
        self._under_way[session] = game.turn = outcome

        def done(found: pb.StepResponse | pb.EnvironmentFailure | None, error: BaseException | None) -> None:
            game.turn = None
            if self._under_way.get(session) is outcome:
                del self._under_way[session]
            if error is not None:
                found = game.hung = _hanging(error, timeout_s)
            outcome.set_result(self._turn_ended(session, game, found))

        work = _guarded(lambda: play_turn(game.environment, action))
        self._threads.submit(work, timeout_s, done, lambda _: self._close_late(game.environment))

    async def _play_later(self, session: _Session, game: _Game, action: str, timeout_s: float) -> pb.StepResponse:
        """Plays a turn after what uses the environment now."""
        found = await self._with_game(game, lambda: play_turn(game.environment, action), timeout_s)
        return self._turn_ended(session, game, found)

    def _turn_ended(
        self, session: _Session, game: _Game, found: pb.StepResponse | pb.EnvironmentFailure | None
    ) -> pb.StepResponse:
        if isinstance(found, pb.StepResponse):
            response = found
            game.turns += 1
            if game.turns >= game.response.max_turns and not response.terminated:
                response.truncated = True
        else:
            response = pb.StepResponse(failure=found)
        ended = response.HasField("failure") or response.terminated or response.truncated
        self._table.end_turn(session, response, ended=ended)
        return response

    async def _render(self, request: pb.RenderRequest, timeout_s: float) -> pb.RenderResponse:
        game = self._find(request.session_id)
        found = await self._with_game(game, lambda: draw(game.environment, request.format), timeout_s)
        if isinstance(found, pb.EnvironmentFailure):
            message = f"the environment failed to draw itself: {found.type}: {found.message}"
            raise precondition(Reason.RENDER_UNSUPPORTED, message)
        return found

    async def _renew(self, request: pb.RenewSessionRequest, timeout_s: float) -> pb.RenewSessionResponse:
        self._find(request.session_id)
        return pb.RenewSessionResponse(lease=request.lease)

    async def _close(self, request: pb.CloseSessionRequest, timeout_s: float) -> pb.CloseSessionResponse:
        session = self._table.close(request.session_id)
        if session is not None:
            self._dispose(session)
        return pb.CloseSessionResponse()

    def _find(self, session_id: str) -> _Game:
        try:
            session = self._table.find(session_id)
        except SessionError as error:
            raise refusal(error) from error
        assert session.opened is not None, "a session that can be found has been opened"
        return session.opened

    def _run(self, session: _Session, work: Any) -> None:
        """Runs work for a session to its end, whoever waits for it."""
        task = asyncio.create_task(work)
        self._under_way[session] = task

        def finished(_: asyncio.Task[Any]) -> None:
            if self._under_way.get(session) is task:
                del self._under_way[session]
            if not task.cancelled():
                task.exception()

        task.add_done_callback(finished)

    def _dispose(self, *sessions: _Session) -> None:
        for session in sessions:
            if session.opened is not None:
                task = asyncio.create_task(self._close_game(session.opened))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def _close_game(self, game: _Game) -> None:
        await self._with_game(game, lambda: close_environment(game.environment), _CLOSE_TIMEOUT_S, closes=True)

    def _close_late_start(self, started: tuple[Any, pb.OpenSessionResponse] | pb.EnvironmentFailure | None) -> None:
        if isinstance(started, tuple):
            self._close_late(started[0])

    def _close_late(self, environment: Any) -> None:
        """Closes an environment that was given up, now that no thread is in it any more."""
        task = asyncio.create_task(self._in_thread(lambda: close_environment(environment), _CLOSE_TIMEOUT_S))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _with_game(
        self, game: _Game, work: Callable[[], T], timeout_s: float, *, closes: bool = False
    ) -> T | pb.EnvironmentFailure:
        """Runs work on an environment, after the turn that is being played."""
        async with game.lock:
            if game.turn is not None:
                await asyncio.shield(game.turn)
            if game.hung is not None:
                return game.hung
            late = None if closes else lambda _: self._close_late(game.environment)
            found = await self._in_thread(work, timeout_s, late=late)
            if isinstance(found, pb.EnvironmentFailure) and found.kind == pb.ENVIRONMENT_FAILURE_KIND_TIMEOUT:
                game.hung = found
            return found

    async def _in_thread(
        self,
        work: Callable[[], T],
        timeout_s: float,
        *passing: type[Exception],
        late: Callable[[Any], None] | None = None,
    ) -> T | pb.EnvironmentFailure:
        """Runs the user's code; whatever goes wrong is returned as a failure, but for errors that may pass."""
        try:
            found: T | pb.EnvironmentFailure = await self._threads.run(_guarded(work, *passing), timeout_s, late)
            return found
        except (WorkTimeoutError, ThreadsHungError) as error:
            return _hanging(error, timeout_s)


def _guarded(work: Callable[[], T], *passing: type[Exception]) -> Callable[[], T | pb.EnvironmentFailure]:
    """Returns work that returns what goes wrong as a failure, but for errors that may pass."""

    def guarded() -> T | pb.EnvironmentFailure:
        try:
            return work()
        except passing:
            raise
        except BaseException as error:  # an environment may raise anything, SystemExit too
            _log.warning("an environment failed", exc_info=error)
            return failure_of(error)

    return guarded


def _hanging(error: BaseException, timeout_s: float) -> pb.EnvironmentFailure:
    """Returns the failure for work that has got no thread, or does not end."""
    hangs = isinstance(error, WorkTimeoutError)
    message = f"no answer within {timeout_s:g} s" if hangs else "all threads of this provider hang; restart it"
    _log.warning("an environment hangs: %s", message)
    return failure(pb.ENVIRONMENT_FAILURE_KIND_TIMEOUT, "Timeout", message)
