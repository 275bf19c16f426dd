"""The environment server: `rollwire.v1.EnvironmentService` over sessions and hosts."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from rollwire.client.sessions import (
    Admission,
    CapacityReachedError,
    EpisodeEndedError,
    RequestIdReusedError,
    Session,
    SessionError,
    SessionTable,
    WrongTurnError,
)
from rollwire.environment.host import EnvironmentHost, Episode
from rollwire.environment.registry import load_registry
from rollwire.environment.requests import (
    DEFAULT_LEASE_S,
    check_action,
    check_open,
    check_render_format,
    lease_message,
    read_lease,
    read_options,
)
from rollwire.rpc.errors import Reason, RollwireError, exhausted, invalid_field, not_found, precondition
from rollwire.rpc.limits import ENVIRONMENT_MESSAGE_BYTES
from rollwire.serving.config.models import RunConfig
from rollwire.serving.logs import get_logger
from rollwire.serving.server import Readiness
from rollwire.v1 import environment_pb2 as pb
from rollwire.v1 import environment_pb2_grpc as pb_grpc

_log = get_logger(__name__)
REAP_INTERVAL_S: Final = 1.0
CLOSE_TIMEOUT_S: Final = 5.0
"""Time that environments get to close when the server stops."""


@dataclass(frozen=True, slots=True)
class _Opened:
    host: EnvironmentHost
    episode: Episode
    response: pb.OpenSessionResponse


_Session = Session[_Opened, pb.StepResponse]


class EnvironmentServer(pb_grpc.EnvironmentServiceServicer):
    """Serves the environments of a configuration; a `rollwire.serving.server.Service`."""

    full_name = "rollwire.v1.EnvironmentService"
    message_bytes = ENVIRONMENT_MESSAGE_BYTES

    def __init__(self, config: RunConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Loads the environments that the configuration defines.

        Args:
            config: The section `environment` is read.
            clock: Monotonic time in seconds, for leases.

        Raises:
            ServeError: A definition cannot be used.
        """
        section = config.environment
        self._registry = load_registry(section)
        self._hosts = {
            tag: EnvironmentHost(registered, section.disable_after_failures)
            for tag, registered in self._registry.environments.items()
        }
        self._table: SessionTable[_Opened, pb.StepResponse] = SessionTable(section.max_sessions, clock)
        # What is under way, for repeats that have to wait for it. At most one entry per session.
        self._under_way: dict[_Session, asyncio.Task[Any]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._reaper: asyncio.Task[None] | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer to the server."""
        pb_grpc.add_EnvironmentServiceServicer_to_server(self, server)

    async def start(self, readiness: Readiness) -> None:
        """Starts the reaper of leases and reports readiness."""
        self._reaper = asyncio.create_task(self._reap_forever())
        _log.info("environments ready", environment_tags=list(self._hosts), session_capacity=self._table.capacity)
        await readiness.set(True)

    async def close(self) -> None:
        """Ends all sessions and gives their environments a few seconds to close."""
        if self._reaper is not None:
            self._reaper.cancel()
        self._dispose(self._table.close_all())
        pending = {*self._closing, *self._under_way.values()}
        if pending:
            await asyncio.wait(pending, timeout=CLOSE_TIMEOUT_S)

    async def ListEnvironments(
        self, request: pb.ListEnvironmentsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListEnvironmentsResponse:
        """Returns the tags that can be opened: disabled ones are left out."""
        return pb.ListEnvironmentsResponse(
            environments=[host.registered.description for host in self._hosts.values() if not host.disabled],
            session_capacity=self._table.capacity,
            open_sessions=len(self._table),
        )

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.OpenSessionResponse:
        """Starts a session, or returns the one that the same request started before."""
        check_open(request)
        options = read_options(request)
        lease_s = read_lease(request.lease) if request.HasField("lease") else DEFAULT_LEASE_S
        host = self._hosts[self._registry.find(request.environment_tag).tag]
        admission, session = self._admit(request, lease_s)
        if admission is Admission.REPEAT and session.opened is not None:
            return session.opened.response
        if admission is Admission.RUN:
            self._run(session, self._open(session, host, options, request.seed))
        response: pb.OpenSessionResponse = await asyncio.shield(self._under_way[session])
        return response

    def _admit(self, request: pb.OpenSessionRequest, lease_s: float) -> tuple[Admission, _Session]:
        if len(self._table) >= self._table.capacity:
            self._reap()
        try:
            return self._table.open(request.request_id, _fingerprint(request), lease_s)
        except RequestIdReusedError as error:
            raise invalid_field(
                "request_id", request.request_id, "a new key, because this one opened a session with other settings"
            ) from error
        except CapacityReachedError as error:
            raise exhausted(
                Reason.SESSIONS_EXHAUSTED,
                f"all {self._table.capacity} sessions are in use; close some, wait for leases to end, or raise "
                "environment.max_sessions",
                retry_after_s=REAP_INTERVAL_S,
                session_capacity=str(self._table.capacity),
            ) from error

    async def _open(self, session: _Session, host: EnvironmentHost, options: Any, seed: int) -> pb.OpenSessionResponse:
        try:
            episode, response = await host.start(options, seed)
        except BaseException:
            self._table.forget(session)
            raise
        if episode is None:
            self._table.forget(session)
            return response
        response.session_id = session.session_id
        response.lease.CopyFrom(lease_message(session.lease_s))
        opened = _Opened(host, episode, response)
        self._table.started(session, opened)
        if session.closed:  # the server stopped meanwhile
            self._dispose([session])
        return response

    async def Step(self, request: pb.StepRequest, context: grpc.aio.ServicerContext) -> pb.StepResponse:
        """Plays a turn, or returns the reply of the latest one."""
        action = request.action
        check_action(action)
        try:
            admission, session = self._table.begin_turn(request.session_id, request.turn)
        except SessionError as error:
            raise _refusal(error, request.turn) from error
        if admission is Admission.REPEAT and session.reply is not None:
            return session.reply
        if admission is Admission.RUN and session.opened is not None:
            host, episode = session.opened.host, session.opened.episode
            response = host.play_now(episode, action)
            if response is not None:
                self._table.end_turn(session, response, ended=episode.ended)
                return response
            self._run(session, self._play(session, host, episode, action))
        shared: pb.StepResponse = await asyncio.shield(self._under_way[session])
        return shared

    async def _play(self, session: _Session, host: EnvironmentHost, episode: Episode, action: str) -> pb.StepResponse:
        try:
            response = await host.play(episode, action)
        except BaseException:
            self._dispose([session])
            raise
        self._table.end_turn(session, response, ended=episode.ended)
        return response

    async def RenewSession(
        self, request: pb.RenewSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.RenewSessionResponse:
        """Renews a lease."""
        lease_s = read_lease(request.lease) if request.HasField("lease") else None
        try:
            session = self._table.renew(request.session_id, lease_s)
        except SessionError as error:
            raise _refusal(error) from error
        return pb.RenewSessionResponse(lease=lease_message(session.lease_s))

    async def Render(self, request: pb.RenderRequest, context: grpc.aio.ServicerContext) -> pb.RenderResponse:
        """Draws the current state."""
        check_render_format(request.format)
        try:
            session = self._table.find(request.session_id)
        except SessionError as error:
            raise _refusal(error) from error
        assert session.opened is not None, "a session that can be found has been opened"
        return await session.opened.host.draw(session.opened.episode, request.format)

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.CloseSessionResponse:
        """Ends a session; an unknown one is no error."""
        session = self._table.close(request.session_id)
        if session is not None:
            self._dispose([session])
        return pb.CloseSessionResponse()

    def _run(self, session: _Session, work: Coroutine[Any, Any, Any]) -> None:
        """Runs work for a session to its end, even if the call that asked for it is cancelled."""
        task = asyncio.create_task(work)
        self._under_way[session] = task

        def finished(_: asyncio.Task[Any]) -> None:
            if self._under_way.get(session) is task:  # the next turn may have begun
                del self._under_way[session]
            if not task.cancelled():
                task.exception()  # every call that waits raises it; when none does, asyncio need not complain

        task.add_done_callback(finished)

    def _dispose(self, sessions: Iterable[_Session]) -> None:
        """Forgets sessions and closes their environments in the background."""
        for session in sessions:
            self._table.forget(session)
            if session.opened is not None:
                task = asyncio.create_task(session.opened.host.close(session.opened.episode))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    def _reap(self) -> None:
        expired = self._table.reap()
        if expired:
            _log.info("leases ended", sessions=len(expired), open_sessions=len(self._table))
            self._dispose(expired)

    async def _reap_forever(self) -> None:
        while True:
            await asyncio.sleep(REAP_INTERVAL_S)
            self._reap()


def _fingerprint(request: pb.OpenSessionRequest) -> bytes:
    """Returns a digest of everything that a repeat of the request has to have in common with it."""
    return hashlib.sha256(request.SerializeToString(deterministic=True)).digest()


def _refusal(error: SessionError, turn: int = 0) -> RollwireError:
    """Returns the error of the contract for what the session table raised."""
    if isinstance(error, EpisodeEndedError):
        return precondition(
            Reason.EPISODE_ENDED, f"turn {turn} cannot be played: the episode has ended; open a new session"
        )
    if isinstance(error, WrongTurnError):
        return precondition(
            Reason.WRONG_TURN,
            f"turn is {turn}; allowed: {error.next_turn} (the next one), or the latest one for its reply",
            turn=str(turn),
            next_turn=str(error.next_turn),
        )
    return not_found(Reason.UNKNOWN_SESSION, "no such session: it was closed, or its lease ended; open a new one")
