"""The server's side of one worker: calls out, replies in, each with a deadline. Everything runs on the event loop.

A worker plays one call after another, so the deadline is that of the call at the head: it begins when the call before
it has been answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from rollwire.client.results import failure
from rollwire.environment.isolation.frames import FrameError, FrameReader, Kind, frame
from rollwire.v1 import environment_pb2 as pb

START_TIMEOUT_S: Final = 150.0
"""Longest time until a new worker answers calls; it may have to import the environment anew."""

Outcome = pb.SessionReply | pb.EnvironmentFailure
Deliver = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class _Waiting:
    call_id: int
    timeout_s: float
    deliver: Deliver


@dataclass(frozen=True)
class WorkerEvents:
    """What a connection reports.

    Attributes:
        learned: The worker declares how metrics are aggregated.
        stack: It sent a stack trace for the log.
        broken: It exceeded a deadline, or broke the rules of the connection: it has to be killed. All calls have been
            answered with failures.
    """

    learned: Callable[[pb.EnvironmentDescription], None]
    stack: Callable[[str], None]
    broken: Callable[[pb.EnvironmentFailure], None]


class WorkerConnection(asyncio.Protocol):
    """Calls to one worker.

    Attributes:
        lost: Why no call is answered any more; None while the worker works.
    """

    def __init__(self, events: WorkerEvents) -> None:
        self.lost: pb.EnvironmentFailure | None = None
        self._events = events
        self._reader = FrameReader()
        self._waiting: deque[_Waiting] = deque()
        self._transport: asyncio.Transport | None = None
        self._before_connection: list[bytes] = []
        self._started = False
        self._calls = 0
        self._loop = asyncio.get_running_loop()
        self._deadline_s = self._loop.time() + START_TIMEOUT_S
        self._timer: asyncio.TimerHandle | None = None
        self._arm(self._deadline_s)

    def call(self, call: pb.SessionCall, timeout_s: float, deliver: Deliver) -> None:
        """Sends a call.

        Args:
            call: The call; its `call_id` is set here.
            timeout_s: Longest time from when the worker begins with it.
            deliver: Gets the reply, or a failure. Called once.
        """
        if self.lost is not None:
            deliver(self.lost)
            return
        self._calls += 1
        call.call_id = self._calls
        self._waiting.append(_Waiting(self._calls, timeout_s, deliver))
        if len(self._waiting) == 1 and self._started:
            self._begin_head()
        data = frame(Kind.CALL, call.SerializeToString())
        if self._transport is None:
            self._before_connection.append(data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Lets the worker end by itself."""
        self._cancel_timer()
        if self._transport is not None:
            self._transport.close()

    def lose(self, found: pb.EnvironmentFailure, others: pb.EnvironmentFailure | None = None) -> bool:
        """Gives the worker up: all calls fail.

        Args:
            found: The failure of the call that it was playing.
            others: The failure of calls that were waiting, and of later ones; `found` if not given.

        Returns:
            Whether it was playing a call.
        """
        if self.lost is not None:
            return False
        self.lost = others or found
        self._cancel_timer()
        if self._transport is not None:
            self._transport.abort()
        waiting, self._waiting = self._waiting, deque()
        for index, one in enumerate(waiting):
            one.deliver(found if index == 0 else self.lost)
        return bool(waiting)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends what was called meanwhile."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self.lost is not None:
            transport.abort()
        for data in self._before_connection:
            transport.write(data)
        self._before_connection.clear()

    def data_received(self, data: bytes) -> None:
        """Takes replies."""
        try:
            for kind, payload in self._reader.feed(data):
                self._take(kind, payload)
        except (FrameError, DecodeError, UnicodeDecodeError) as error:
            self._break(
                failure(
                    pb.ENVIRONMENT_FAILURE_KIND_LOST, "Lost", f"its process wrote into the server's connection: {error}"
                )
            )

    def connection_lost(self, error: Exception | None) -> None:
        """Leaves it to the zygote to tell how the worker ended: a descendant may hold its descriptors open."""

    def _take(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.REPLY:
            reply = pb.SessionReply.FromString(payload)
            if not self._waiting or reply.call_id != self._waiting[0].call_id:
                raise FrameError("a reply to no call")
            head = self._waiting.popleft()
            if self._waiting:
                self._begin_head()
            head.deliver(reply)
        elif kind is Kind.STARTED:
            self._started = True
            if self._waiting:
                self._begin_head()
        elif kind is Kind.LEARNED:
            self._events.learned(pb.EnvironmentDescription.FromString(payload))
        elif kind is Kind.STACK:
            self._events.stack(payload.decode(errors="replace"))
        else:
            raise FrameError(f"a frame of kind {kind.name}")

    def _begin_head(self) -> None:
        self._deadline_s = self._loop.time() + self._waiting[0].timeout_s
        if self._timer is None or self._timer.when() > self._deadline_s:
            self._arm(self._deadline_s)

    def _arm(self, when_s: float) -> None:
        """Sets the timer. It is left alone when a deadline moves on: most calls end long before it fires."""
        self._cancel_timer()
        self._timer = self._loop.call_at(when_s, self._on_timer)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        if self._started and not self._waiting:
            return
        if self._loop.time() < self._deadline_s:
            self._arm(self._deadline_s)
            return
        message = (
            f"no answer within {self._waiting[0].timeout_s:g} s"
            if self._started
            else f"its process did not start within {START_TIMEOUT_S:g} s"
        )
        self._break(failure(pb.ENVIRONMENT_FAILURE_KIND_TIMEOUT, "Timeout", message))

    def _break(self, found: pb.EnvironmentFailure) -> None:
        others = failure(
            pb.ENVIRONMENT_FAILURE_KIND_LOST,
            "Lost",
            f"another session of the same process failed, and the process was killed: {found.message}",
        )
        if self.lost is None:
            self.lose(found, others)
            self._events.broken(found)
