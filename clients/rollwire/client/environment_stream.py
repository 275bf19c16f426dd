"""Calls of any number of sessions over one `Play` stream: the methods of `EnvironmentClient` at a fraction of the cost.

Calls made in one turn of the event loop travel together. A stream that breaks is opened again, and what was not
answered is asked again: every call is idempotent. A server without `Play` is called method by method.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

import grpc
import grpc.aio

from rollwire.client.call_book import CallBook, PendingCall
from rollwire.client.environment import EnvironmentClient
from rollwire.rpc.call_errors import deadline_exceeded, from_call_error
from rollwire.rpc.deadlines import deadline_s
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.expiry import Expiry
from rollwire.rpc.first_status import FirstStatus
from rollwire.v1 import environment_pb2 as pb

_log = logging.getLogger("rollwire.client")
_SERVICE: Final = "/rollwire.v1.EnvironmentService/"
_TIMEOUTS_S: Final = {
    kind: deadline_s(_SERVICE + method)
    for kind, method in (
        ("open", "OpenSession"),
        ("step", "Step"),
        ("renew", "RenewSession"),
        ("close", "CloseSession"),
        ("render", "Render"),
    )
}
MAX_STREAMS_IN_VAIN: Final = 5
"""Streams opened in a row that bring no reply, until all waiting calls fail."""

_SHORTEST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0
_MAX_UNKNOWN_REPLIES: Final = 1000
_BROKEN: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
    }
)


class _OneByOne(Exception):  # noqa: N818 (an instruction, not an error)
    """The call has to be made as a unary one."""


class SessionStream:
    """Opens and plays sessions over one stream; use as an async context manager or call `close`.

    The methods are those of `EnvironmentClient`, with the same errors. Any number of coroutines of one event loop may
    call them. The stream is opened by the first call; an idle one costs nothing but keepalive.

    Args:
        client: Channel and target; it stays the caller's to close, after this.
    """

    def __init__(self, client: EnvironmentClient) -> None:
        self.target = client.target
        self._client = client
        self._book = CallBook()
        self._expiry: Expiry[PendingCall] = Expiry(_expire)
        self._wake_writer = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._unsupported = False
        self._closed = False
        self._in_vain = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the stream; calls that wait fail with CANCELLED. Sessions go on."""
        self._closed = True
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait((self._runner,))
        _fail(self._book.take_all(), _closed_error())
        self._expiry.clear()

    async def open_session(
        self, request: pb.OpenSessionRequest, *, timeout_s: float | None = None
    ) -> pb.OpenSessionResponse:
        """Starts a session."""
        received: pb.OpenSessionResponse = await self.call("open", request, timeout_s=timeout_s)
        # Kept for a whole episode: a part of a received message keeps all of it.
        response = pb.OpenSessionResponse()
        response.CopyFrom(received)
        return response

    async def step(self, session_id: str, turn: int, action: str, *, timeout_s: float | None = None) -> pb.StepResponse:
        """Plays turn number `turn` (from 0); a repeat of the latest turn returns the same reply."""
        request = pb.StepRequest(session_id=session_id, turn=turn, action=action)
        response: pb.StepResponse = await self.call("step", request, timeout_s=timeout_s)
        return response

    async def renew_session(
        self, session_id: str, lease_s: float | None = None, *, timeout_s: float | None = None
    ) -> pb.RenewSessionResponse:
        """Extends the lease to `lease_s` seconds from now, 1 to 3600; None keeps the length granted before."""
        request = pb.RenewSessionRequest(session_id=session_id)
        if lease_s is not None:
            request.lease.FromNanoseconds(int(lease_s * 1e9))
        response: pb.RenewSessionResponse = await self.call("renew", request, timeout_s=timeout_s)
        return response

    async def render(
        self, session_id: str, render_format: pb.RenderFormat.ValueType, *, timeout_s: float | None = None
    ) -> pb.RenderResponse:
        """Draws the current state."""
        request = pb.RenderRequest(session_id=session_id, format=render_format)
        response: pb.RenderResponse = await self.call("render", request, timeout_s=timeout_s)
        return response

    async def close_session(self, session_id: str, *, timeout_s: float | None = None) -> None:
        """Ends a session; unknown sessions are no error."""
        await self.call("close", pb.CloseSessionRequest(session_id=session_id), timeout_s=timeout_s)

    async def call(self, kind: str, request: Any, *, timeout_s: float | None = None) -> Any:
        """Makes a call by the name that it has in `SessionCall`: open, step, renew, close or render."""
        if self._closed:
            raise _closed_error()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + (_TIMEOUTS_S[kind] if timeout_s is None else timeout_s)
        if not self._unsupported:
            pending = self._book.add(kind, request, end_s, loop.create_future())
            self._expiry.add(pending, end_s)
            self._wake_writer.set()
            if self._runner is None or self._runner.done():
                self._runner = asyncio.create_task(self._run())
            try:
                return await pending.answer
            except _OneByOne:
                pass
            finally:
                self._expiry.discard(pending)
        return await self._client.call(kind, request, timeout_s=end_s - loop.time())

    async def _run(self) -> None:
        """Keeps a stream open while anyone waits for an answer."""
        while self._book.waiting:
            try:
                await self._stream()
                error = _broken(f"{self.target} ended the stream of session calls", grpc.StatusCode.UNAVAILABLE)
            except RollwireError as raised:
                error = raised
            self._in_vain += 1
            self._after(error)
            if self._book.waiting:
                pause_s = min(_SHORTEST_PAUSE_S * 2 ** (self._in_vain - 1), _LONGEST_PAUSE_S)
                await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))  # noqa: S311 (spreads clients, no secret)

    def _after(self, error: RollwireError) -> None:
        """Decides what becomes of the calls of a stream that ended."""
        if error.code is grpc.StatusCode.UNIMPLEMENTED:
            self._unsupported = True
            _fail(self._book.take_all(), None)
        elif error.code not in _BROKEN or error.reason == Reason.INTERNAL:
            # The server ended the stream for what one of the calls holds: each has to answer for itself.
            _fail(self._book.take_sent(), None)
        else:
            _fail(self._book.repeat(), error)
        if self._in_vain >= MAX_STREAMS_IN_VAIN:
            _fail(self._book.take_all(), error)
            self._in_vain = 0

    async def _stream(self) -> None:
        """One stream, until the server ends it. Raises `RollwireError` unless it ends well."""
        call = self._client.play_stream()
        status = FirstStatus(call)
        writer = asyncio.create_task(self._write(call))
        unknown = 0
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                if message is None:  # gRPC's answer to bytes that cannot be parsed
                    raise RollwireError(
                        grpc.StatusCode.INTERNAL, Reason.TRANSPORT, f"{self.target} sent no PlayResponse"
                    )
                unknown += self._take(message)
                if unknown > _MAX_UNKNOWN_REPLIES:
                    raise _broken(f"{self.target} sent {unknown} replies to calls that nobody made")
        except grpc.aio.AioRpcError as error:
            raise status.decode(error) from error
        finally:
            writer.cancel()
            call.cancel()

    async def _write(self, call: Any) -> None:
        """Sends what waits. Ends with the stream; how it ended is the reader's to find out."""
        loop = asyncio.get_running_loop()
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                self._wake_writer.clear()
                while (message := self._book.next_message(loop.time())) is not None:
                    await call.write(message)
                await self._wake_writer.wait()

    def _take(self, message: pb.PlayResponse) -> int:
        """Hands out replies; returns how many belong to no call."""
        unknown = 0
        for reply in message.replies:
            pending = self._book.answered(reply.call_id)
            if pending is None:
                unknown += 1
                continue
            self._in_vain = 0
            if not pending.answer.done():
                self._answer(pending, reply)
        if unknown:
            _log.warning("%s sent %d replies to calls that nobody made", self.target, unknown)
        self._wake_writer.set()  # there is room for more calls
        return unknown

    def _answer(self, pending: PendingCall, reply: pb.SessionReply) -> None:
        kind = reply.WhichOneof("reply")
        if kind == pending.kind:
            pending.answer.set_result(getattr(reply, kind))
        elif kind == "error":
            pending.answer.set_exception(from_call_error(reply.error))
        else:
            pending.answer.set_exception(
                _broken(f"{self.target} answered a call of kind {pending.kind} with {kind or 'nothing'}")
            )


def _expire(pending: PendingCall) -> None:
    if not pending.answer.done():
        pending.answer.set_exception(deadline_exceeded())


def _fail(calls: list[PendingCall], error: RollwireError | None) -> None:
    """Fails calls, each with an error of its own; None sends them away to be made as unary ones."""
    for call in calls:
        if not call.answer.done():
            call.answer.set_exception(_OneByOne() if error is None else error.copy())


def _broken(message: str, code: grpc.StatusCode = grpc.StatusCode.INTERNAL) -> RollwireError:
    return RollwireError(code, Reason.TRANSPORT, message)


def _closed_error() -> RollwireError:
    return _broken("the stream of session calls was closed", grpc.StatusCode.CANCELLED)
