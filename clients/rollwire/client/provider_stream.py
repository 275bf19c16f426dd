"""A provider's connection: attaches, answers calls, and attaches again after a cut with its sessions alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio

from rollwire.client.provider_sessions import ProviderSessions
from rollwire.client.results import failure
from rollwire.rpc.channel import open_environment_channel
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.first_status import FirstStatus
from rollwire.rpc.limits import ENVIRONMENT_MESSAGE_BYTES, MIB
from rollwire.v1 import environment_pb2 as pb
from rollwire.v1 import environment_pb2_grpc as pb_grpc

_log = logging.getLogger("rollwire.provider")
_WELCOME_TIMEOUT_S: Final = 20.0
_END_TIMEOUT_S: Final = 10.0
_FIRST_DELAY_S: Final = 0.2
_LONGEST_DELAY_S: Final = 5.0
_MESSAGE_BYTES: Final = MIB
"""Replies that are ready together share a message up to about this size."""

_TRANSIENT: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
    }
)
"""What may be otherwise the next time; anything else is an answer to what this provider is."""


@dataclass(frozen=True)
class ProviderSettings:
    """How a provider serves.

    Attributes:
        capacity: Sessions at once.
        give_up_after_s: Longest time without a connection before it ends.
        drain_timeout_s: Longest time that running sessions get when it is asked to stop.
        program: Name and version, for the server's log.
    """

    capacity: int
    give_up_after_s: float
    drain_timeout_s: float
    program: str


@dataclass
class _Outbox:
    """Replies that wait for the stream; bounded by the calls that it brought."""

    replies: list[pb.SessionReply] = field(default_factory=list)
    capacity: int | None = None
    drain: bool = False
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    written: asyncio.Event = field(default_factory=asyncio.Event)

    def fill(self) -> None:
        """Says that something waits."""
        self.written.clear()
        self.filled.set()

    def take(self) -> list[pb.AttachRequest]:
        """Returns everything that waits, as messages."""
        self.filled.clear()
        messages = []
        if self.capacity is not None:
            messages.append(pb.AttachRequest(capacity=pb.ProviderCapacity(capacity=self.capacity)))
            self.capacity = None
        size, batch = 0, pb.ProviderReplies()
        for reply in self.replies:
            if batch.replies and size + reply.ByteSize() > _MESSAGE_BYTES:
                messages.append(pb.AttachRequest(replies=batch))
                size, batch = 0, pb.ProviderReplies()
            batch.replies.append(reply)
            size += reply.ByteSize()
        self.replies.clear()
        if batch.replies:
            messages.append(pb.AttachRequest(replies=batch))
        if self.drain:
            messages.append(pb.AttachRequest(drain=pb.ProviderDrain()))
            self.drain = False
        return messages


class ProviderConnection:
    """Serves sessions to one environment server until asked to stop.

    Args:
        target: `host:port` of the environment server.
        provider_id: Secret name of this provider; the same after a reconnect.
        descriptions: What it serves.
        sessions: Answers the calls.
        settings: How it serves.
    """

    def __init__(
        self,
        target: str,
        provider_id: str,
        descriptions: Sequence[pb.EnvironmentDescription],
        sessions: ProviderSessions,
        settings: ProviderSettings,
    ) -> None:
        self._target = target
        self._provider_id = provider_id
        self._descriptions = descriptions
        self._sessions = sessions
        self._settings = settings
        self._answering: set[asyncio.Task[None]] = set()
        self._connected_at_s = time.monotonic()
        self._lease_s = 0.0
        self._announced = settings.capacity
        self._quiet = asyncio.Event()

    async def serve(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set and the running sessions have ended.

        Raises:
            RollwireError: The server refuses this provider, or could not be reached for too long.
        """
        try:
            async with open_environment_channel(self._target) as channel:
                await self._keep_attached(pb_grpc.EnvironmentServiceStub(channel), stop)
        finally:
            self._sessions.close_all()
            await self._sessions.closed()

    async def _keep_attached(self, stub: Any, stop: asyncio.Event) -> None:
        self._connected_at_s = time.monotonic()
        delay_s = _FIRST_DELAY_S
        while not stop.is_set():
            before_s = self._connected_at_s
            try:
                await self._attach(stub, stop)
                cause = "the server ended the stream"
            except RollwireError as error:
                if error.code not in _TRANSIENT:
                    raise
                cause = error.message
            if stop.is_set():
                break
            delay_s = _FIRST_DELAY_S if self._connected_at_s > before_s else min(2 * delay_s, _LONGEST_DELAY_S)
            self._check_budget(cause, delay_s)
            await _wait(stop, delay_s * random.uniform(0.5, 1.0))  # noqa: S311 (spreads reconnects, no secret)

    def _check_budget(self, cause: str, delay_s: float) -> None:
        away_s = time.monotonic() - self._connected_at_s
        if away_s > self._settings.give_up_after_s:
            raise RollwireError(
                grpc.StatusCode.UNAVAILABLE,
                Reason.TRANSPORT,
                f"no environment server takes this provider at {self._target} ({cause}); tried for "
                f"{self._settings.give_up_after_s:g} s. Start one with `rollwire serve environment`, or check the "
                "address",
            )
        if self._lease_s and away_s > self._lease_s and len(self._sessions):
            _log.warning("%s was away for longer than it keeps sessions; closing %d", self._target, len(self._sessions))
            self._sessions.close_all()
        _log.warning("not attached to %s (%s); trying again in %.1f s", self._target, cause, delay_s)

    async def _attach(self, stub: Any, stop: asyncio.Event) -> None:
        """One stream from hello to end. Raises `RollwireError` when it breaks or is refused."""
        call = stub.Attach()
        status = FirstStatus(call)
        outbox = _Outbox()
        helpers: list[asyncio.Task[None]] = []
        try:
            await call.write(pb.AttachRequest(hello=self._hello()))
            async with asyncio.timeout(_WELCOME_TIMEOUT_S):
                first = await call.read()
            if first is grpc.aio.EOF or first.WhichOneof("message") != "welcome":
                raise RollwireError(grpc.StatusCode.UNAVAILABLE, Reason.TRANSPORT, "the server did not welcome it")
            self._lease_s = first.welcome.lease.ToNanoseconds() / 1e9
            self._connected_at_s = time.monotonic()
            _log.info("attached to %s", self._target)
            helpers = [
                asyncio.create_task(self._send(call, outbox)),
                asyncio.create_task(self._drain(call, outbox, stop)),
            ]
            await self._receive(call, outbox)
        except grpc.aio.AioRpcError as error:
            raise status.decode(error) from error
        except TimeoutError as error:
            message = f"no welcome within {_WELCOME_TIMEOUT_S:g} s"
            raise RollwireError(grpc.StatusCode.DEADLINE_EXCEEDED, Reason.TRANSPORT, message) from error
        except asyncio.InvalidStateError as error:  # writing to a call that has ended
            raise await _ended(call, status) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if not call.cancelled() or task is None or task.cancelling():
                raise
            message = f"the server did not end the stream within {_END_TIMEOUT_S:g} s"  # `_drain` has cut it
            raise RollwireError(grpc.StatusCode.CANCELLED, Reason.TRANSPORT, message) from error
        finally:
            if self._lease_s and helpers:
                self._connected_at_s = time.monotonic()
            for helper in helpers:
                helper.cancel()
            call.cancel()

    def _hello(self) -> pb.ProviderHello:
        self._announced = max(self._settings.capacity - self._sessions.hung_threads, 1, len(self._sessions))
        return pb.ProviderHello(
            provider_id=self._provider_id,
            environments=self._descriptions,
            capacity=self._announced,
            session_ids=self._sessions.session_ids,
            program=self._settings.program,
        )

    async def _receive(self, call: Any, outbox: _Outbox) -> None:
        while (response := await call.read()) is not grpc.aio.EOF:
            kind = response.WhichOneof("message")
            if kind == "calls":
                self._quiet.clear()
                for one in response.calls.calls:
                    task = asyncio.create_task(self._answer(one, outbox))
                    self._answering.add(task)
                    task.add_done_callback(self._answered)
            elif kind == "drain":
                _log.info("%s is shutting down", self._target)
        if (code := await call.code()) is not grpc.StatusCode.OK:
            raise RollwireError(code, Reason.TRANSPORT, await call.details() or code.name)

    async def _answer(self, one: pb.SessionCall, outbox: _Outbox) -> None:
        reply = await self._sessions.answer(one)
        if reply.ByteSize() > ENVIRONMENT_MESSAGE_BYTES - 1024:
            reply = _too_large(reply)
        outbox.replies.append(reply)
        usable = max(self._settings.capacity - self._sessions.hung_threads, 0)
        if usable != self._announced:
            outbox.capacity = self._announced = usable
        outbox.fill()

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._answering.discard(task)
        self._look_whether_quiet()

    def _look_whether_quiet(self) -> None:
        """Notes whether nothing is left to do."""
        if self._answering or len(self._sessions):
            self._quiet.clear()
        else:
            self._quiet.set()

    async def _send(self, call: Any, outbox: _Outbox) -> None:
        """Writes what the outbox holds; when the stream breaks, reading says why."""
        while True:
            await outbox.filled.wait()
            for message in outbox.take():
                try:
                    await call.write(message)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return
            if not outbox.filled.is_set():
                outbox.written.set()

    async def _drain(self, call: Any, outbox: _Outbox, stop: asyncio.Event) -> None:
        """When asked to stop: takes no new sessions, waits for the running ones, then ends the stream."""
        await stop.wait()
        outbox.drain = True
        outbox.fill()
        self._look_whether_quiet()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self._quiet.wait()
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                await outbox.written.wait()
                await call.done_writing()
                await call.code()  # the server ends the stream
        call.cancel()


def _too_large(reply: pb.SessionReply) -> pb.SessionReply:
    """Returns the failure for a reply that fits into no message."""
    found = failure(
        pb.ENVIRONMENT_FAILURE_KIND_INVALID_RESULT,
        "InvalidResult",
        f"the reply has {reply.ByteSize()} bytes; a message has at most {ENVIRONMENT_MESSAGE_BYTES}",
    )
    if reply.WhichOneof("reply") == "open":
        return pb.SessionReply(call_id=reply.call_id, open=pb.OpenSessionResponse(failure=found))
    return pb.SessionReply(call_id=reply.call_id, step=pb.StepResponse(failure=found))


async def _ended(call: Any, status: FirstStatus) -> RollwireError:
    """Returns the error that ended a call."""
    try:
        await call.read()
        code = await call.code()
        return RollwireError(code, Reason.TRANSPORT, await call.details() or code.name)
    except grpc.aio.AioRpcError as error:
        return status.decode(error)


async def _wait(stop: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await stop.wait()
    except TimeoutError:
        pass
