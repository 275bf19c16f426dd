"""The calls on sessions, whatever carries them: the unary methods and the streams ask here and nowhere else.

A call is answered at once where that is possible, and otherwise with a future that all who ask the same share. Whoever
gives up waiting leaves the future alone: the work goes on to its end, and a repeat of the call finds the outcome.
"""

from __future__ import annotations

import asyncio
import hashlib
from asyncio import Future
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from rollwire.client.session_errors import refusal
from rollwire.client.sessions import (
    Admission,
    CapacityReachedError,
    RequestIdReusedError,
    Session,
    SessionError,
    SessionTable,
)
from rollwire.environment.hosts import Host, HostedEpisode, Hosts
from rollwire.environment.requests import (
    DEFAULT_LEASE_S,
    check_action,
    check_open,
    check_render_format,
    lease_message,
    read_lease,
    read_options,
)
from rollwire.rpc.errors import Reason, exhausted, invalid_field
from rollwire.serving.logs import get_logger
from rollwire.v1 import environment_pb2 as pb

_log = get_logger(__name__)
REAP_INTERVAL_S: Final = 1.0
CLOSE_TIMEOUT_S: Final = 5.0
"""Time that environments get to close when the server stops."""


@dataclass(frozen=True, slots=True)
class _Opened:
    host: Host
    episode: HostedEpisode
    response: pb.OpenSessionResponse


_Session = Session[_Opened, pb.StepResponse]
Response: TypeAlias = (
    pb.OpenSessionResponse | pb.StepResponse | pb.RenewSessionResponse | pb.RenderResponse | pb.CloseSessionResponse
)


class SessionCalls:
    """Answers calls on the sessions of one server.

    Attributes:
        hosts: Who plays; tags may be added and removed at any time.
    """

    def __init__(self, hosts: Hosts, capacity: int, clock: Callable[[], float]) -> None:
        """Creates a server's sessions: none yet.

        Args:
            hosts: Who plays.
            capacity: Most sessions at once.
            clock: Monotonic time in seconds, for leases.
        """
        self.hosts = hosts
        self._table: SessionTable[_Opened, pb.StepResponse] = SessionTable(capacity, clock)
        # What is under way, for all who wait for it. At most one entry per session.
        self._under_way: dict[_Session, Future[Any]] = {}
        # At most one entry per session and format.
        self._drawing: dict[tuple[_Session, int], asyncio.Task[pb.RenderResponse]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def list(self) -> pb.ListEnvironmentsResponse:
        """Returns the tags that can be opened: disabled ones are left out."""
        return pb.ListEnvironmentsResponse(
            environments=self.hosts.descriptions(),
            session_capacity=self._table.capacity,
            open_sessions=len(self._table),
        )

    def open(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse | Future[pb.OpenSessionResponse]:
        """Starts a session, or finds the one that the same request started before. Raises `RollwireError`."""
        check_open(request)
        options = read_options(request)
        lease_s = read_lease(request.lease) if request.HasField("lease") else DEFAULT_LEASE_S
        host = self.hosts.find(request.environment_tag)
        admission, session = self._admit(request, lease_s)
        if admission is Admission.REPEAT and session.opened is not None:
            return session.opened.response
        if admission is Admission.RUN:
            task = asyncio.create_task(self._open(session, host, options, request.seed))
            self._under_way[session] = task
            task.add_done_callback(lambda done: self._started(session, done))
        return self._under_way[session]

    def step(self, request: pb.StepRequest) -> pb.StepResponse | Future[pb.StepResponse]:
        """Plays a turn, or finds the reply of the latest one. Raises `RollwireError`."""
        action = request.action
        check_action(action)
        try:
            admission, session = self._table.begin_turn(request.session_id, request.turn)
        except SessionError as error:
            raise refusal(error, request.turn) from error
        if admission is Admission.REPEAT and session.reply is not None:
            return session.reply
        if admission is Admission.RUN and session.opened is not None:
            opened = session.opened
            response = opened.host.play_now(opened.episode, action)
            if response is not None:
                self._table.end_turn(session, response, ended=opened.episode.ended)
                return response
            self._play(session, opened, action)
        return self._under_way[session]

    def renew(self, request: pb.RenewSessionRequest) -> pb.RenewSessionResponse:
        """Renews a lease. Raises `RollwireError`."""
        lease_s = read_lease(request.lease) if request.HasField("lease") else None
        try:
            session = self._table.renew(request.session_id, lease_s)
        except SessionError as error:
            raise refusal(error) from error
        return pb.RenewSessionResponse(lease=lease_message(session.lease_s))

    def render(self, request: pb.RenderRequest) -> Future[pb.RenderResponse]:
        """Draws the present state. Raises `RollwireError`, at once or from the future."""
        check_render_format(request.format)
        try:
            session = self._table.find(request.session_id)
        except SessionError as error:
            raise refusal(error) from error
        assert session.opened is not None, "a session that can be found has been opened"
        key = (session, int(request.format))
        task = self._drawing.get(key)
        if task is None:
            task = asyncio.create_task(session.opened.host.draw(session.opened.episode, request.format))
            self._drawing[key] = task
            task.add_done_callback(lambda done: self._drawn(key, done))
        return task

    def close(self, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        """Ends a session; an unknown one is no error."""
        session = self._table.close(request.session_id)
        if session is not None:
            self._dispose([session])
        return pb.CloseSessionResponse()

    def reap(self) -> None:
        """Ends the sessions whose lease is over."""
        expired = self._table.reap()
        if expired:
            _log.info("leases ended", sessions=len(expired), open_sessions=len(self._table))
            self._dispose(expired)

    async def end(self) -> None:
        """Ends all sessions and gives their environments a few seconds to close."""
        self._dispose(self._table.close_all())
        pending = {*self._closing, *self._under_way.values(), *self._drawing.values()}
        if pending:
            await asyncio.wait(pending, timeout=CLOSE_TIMEOUT_S)

    def _admit(self, request: pb.OpenSessionRequest, lease_s: float) -> tuple[Admission, _Session]:
        if len(self._table) >= self._table.capacity:
            self.reap()
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

    async def _open(
        self, session: _Session, host: Host, options: Mapping[str, Any], seed: int
    ) -> pb.OpenSessionResponse:
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

    def _started(self, session: _Session, task: Future[pb.OpenSessionResponse]) -> None:
        # Not a later one: the session can be played before this callback runs.
        if self._under_way.get(session) is task:
            del self._under_way[session]
        _retrieve(task)

    def _play(self, session: _Session, opened: _Opened, action: str) -> None:
        played = asyncio.ensure_future(opened.host.play(opened.episode, action))
        self._under_way[session] = played
        # The first callback, so that whoever waits finds the turn ended.
        played.add_done_callback(lambda _: self._played(session, opened, played))

    def _played(self, session: _Session, opened: _Opened, played: Future[pb.StepResponse]) -> None:
        del self._under_way[session]
        if played.cancelled() or played.exception() is not None:
            self._dispose([session])
        else:
            self._table.end_turn(session, played.result(), ended=opened.episode.ended)

    def _drawn(self, key: tuple[_Session, int], task: asyncio.Task[pb.RenderResponse]) -> None:
        del self._drawing[key]
        _retrieve(task)

    def _dispose(self, sessions: Iterable[_Session]) -> None:
        """Forgets sessions and closes their environments in the background."""
        for session in sessions:
            self._table.forget(session)
            if session.opened is not None:
                task = asyncio.create_task(session.opened.host.close(session.opened.episode))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)


def _retrieve(task: Future[Any]) -> None:
    """Looks at how a task ended: all who wait raise it; when nobody does, asyncio need not complain."""
    if not task.cancelled():
        task.exception()


def _fingerprint(request: pb.OpenSessionRequest) -> bytes:
    """Returns a digest of everything that a repeat of the request has to have in common with it."""
    return hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
