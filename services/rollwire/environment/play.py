"""One `Play` stream: many sessions' calls in, their replies out in batches, each call with its own deadline and error.

What can be answered at once is answered without a task: all calls of one message then share one message of replies.
Everything else is a future that the sessions' calls own; a stream that is cut loses its interest in it, and no more.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from rollwire.environment.calls import Response, SessionCalls
from rollwire.environment.requests import read_timeout
from rollwire.rpc.call_errors import deadline_exceeded, to_call_error
from rollwire.rpc.errors import invalid_field
from rollwire.rpc.expiry import Expiry
from rollwire.rpc.limits import ENVIRONMENT_MESSAGE_BYTES, MAX_UNANSWERED_CALLS
from rollwire.serving.interceptors import answerable, draining_error
from rollwire.v1 import environment_pb2 as pb

_METHOD: Final = "/rollwire.v1.EnvironmentService/Play"
_DRAWING_WEIGHT: Final = 64
"""A drawing is held for its stream alone and may have 2 MiB: it counts as this many unanswered calls."""

_CALLS_PER_SLICE: Final = 256
"""Calls dispatched until others on the event loop have their turn."""

_REPLY_OVERHEAD_BYTES: Final = 32
"""At most what a message adds to one response: tags, lengths and the call id."""

Reply = pb.CallError | Response


@dataclass(eq=False, slots=True)
class _Waiting:
    """A call whose answer is under way."""

    call_id: int
    kind: str
    answer: Future[Any]
    done: Callable[[Future[Any]], None] | None = None


class PlayStream:
    """Answers the calls of one stream.

    Args:
        calls: The server's sessions.
    """

    def __init__(self, calls: SessionCalls) -> None:
        self._answer: Final[dict[str, Callable[[Any], Response | Future[Any]]]] = {
            "open": calls.open,
            "step": calls.step,
            "renew": calls.renew,
            "close": calls.close,
            "render": calls.render,
        }
        # Call id to weight; from the arrival of a call until its reply is in a message.
        self._unanswered: dict[int, int] = {}
        self._weight = 0
        self._ready: deque[tuple[int, str, Reply]] = deque()
        self._expiry: Expiry[_Waiting] = Expiry(self._expired)
        self._draining = False
        self._wake_writer = asyncio.Event()
        self._wake_reader = asyncio.Event()

    def drain(self) -> None:
        """Refuses new calls, and ends the stream when the others are answered."""
        self._draining = True
        self._wake_writer.set()

    async def run(self, requests: AsyncIterator[pb.PlayRequest]) -> AsyncIterator[pb.PlayResponse]:
        """Yields messages of replies until the client has closed its side, or the server drains.

        Raises:
            RollwireError: The client broke a rule of the stream itself, not of a call.
        """
        reader = asyncio.create_task(self._read(requests))
        reader.add_done_callback(lambda _: self._wake_writer.set())
        try:
            while True:
                await self._wake_writer.wait()
                self._wake_writer.clear()
                while self._ready:
                    yield self._next_message()
                if reader.done():
                    reader.result()
                if (reader.done() or self._draining) and not self._unanswered:
                    return
        finally:
            reader.cancel()
            self._expiry.clear()

    async def _read(self, requests: AsyncIterator[pb.PlayRequest]) -> None:
        sliced = 0
        async for request in requests:
            if not request.calls:
                raise invalid_field("calls", "empty", "at least one call")
            for call in request.calls:
                while self._weight >= MAX_UNANSWERED_CALLS:
                    self._wake_reader.clear()
                    self._wake_writer.set()
                    await self._wake_reader.wait()
                self._dispatch(call)
                sliced += 1
                if sliced >= _CALLS_PER_SLICE:
                    sliced = 0
                    self._wake_writer.set()
                    await asyncio.sleep(0)
            self._wake_writer.set()

    def _dispatch(self, call: pb.SessionCall) -> None:
        call_id, kind = call.call_id, call.WhichOneof("call")
        if call_id in self._unanswered:
            raise invalid_field("calls.call_id", call_id, "an id that no unanswered call of this stream has")
        weight = _DRAWING_WEIGHT if kind == "render" else 1
        self._unanswered[call_id] = weight
        self._weight += weight
        try:
            if self._draining:
                raise draining_error()
            timeout_s = read_timeout(call)
            if kind is None:
                raise invalid_field("call", None, "one of open, step, renew, close and render")
            answer = self._answer[kind](getattr(call, kind))
        except Exception as error:
            self._refuse(call_id, error)
            return
        if isinstance(answer, Future):
            self._await(_Waiting(call_id, kind, answer), timeout_s)
        else:
            self._ready.append((call_id, kind, answer))

    def _await(self, waiting: _Waiting, timeout_s: float) -> None:
        waiting.done = partial(self._finished, waiting)
        waiting.answer.add_done_callback(waiting.done)
        self._expiry.add(waiting, asyncio.get_running_loop().time() + timeout_s)

    def _finished(self, waiting: _Waiting, answer: Future[Any]) -> None:
        self._expiry.discard(waiting)
        if answer.cancelled():
            self._refuse(waiting.call_id, draining_error())
        elif (error := answer.exception()) is not None:
            self._refuse(waiting.call_id, error if isinstance(error, Exception) else RuntimeError(repr(error)))
        else:
            self._ready.append((waiting.call_id, waiting.kind, answer.result()))
        self._wake_writer.set()

    def _expired(self, waiting: _Waiting) -> None:
        """Answers a call whose time is over; what it asked for goes on, and a repeat finds it."""
        assert waiting.done is not None, "set before the deadline is"
        waiting.answer.remove_done_callback(waiting.done)
        self._refuse(waiting.call_id, deadline_exceeded())
        self._wake_writer.set()

    def _refuse(self, call_id: int, error: Exception) -> None:
        self._ready.append((call_id, "error", to_call_error(answerable(_METHOD, error))))

    def _next_message(self) -> pb.PlayResponse:
        """Moves what is ready into a message, as much as fits."""
        message = pb.PlayResponse()
        room = ENVIRONMENT_MESSAGE_BYTES
        while self._ready:
            call_id, kind, answer = self._ready[0]
            room -= answer.ByteSize() + _REPLY_OVERHEAD_BYTES
            if room < 0 and message.replies:
                break
            self._ready.popleft()
            reply = message.replies.add()
            reply.call_id = call_id
            part = getattr(reply, kind)
            part.SetInParent()  # an empty response is one as well
            part.CopyFrom(answer)
            self._weight -= self._unanswered.pop(call_id)
        self._wake_reader.set()
        return message
