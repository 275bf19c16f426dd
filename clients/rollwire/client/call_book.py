"""Which calls of a stream wait to be sent, and which to be answered. Pure bookkeeping: no I/O, no clock of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import grpc

from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.limits import ENVIRONMENT_MESSAGE_BYTES, MAX_UNANSWERED_CALLS
from rollwire.v1 import environment_pb2 as pb

MAX_SENDS: Final = 5
"""A call is sent over this many streams at most."""

SMALL_MESSAGE_CALLS: Final = 32
"""Waiting calls up to this number travel in one message; of more, an eighth does, but no fewer than this. One message
of all would leave the server idle while it is written, and the client while it is answered."""

_SHARE: Final = 8

_CALL_OVERHEAD_BYTES: Final = 64
"""At most what a message adds to one request: tags, lengths, call id and timeout."""

_MAX_TIMEOUT_S: Final = 3600.0


@dataclass(eq=False, slots=True)
class PendingCall:
    """A call that has no answer yet.

    Attributes:
        call_id: Its number, never used twice.
        kind: Field of `SessionCall` and `SessionReply`: open, step, renew, close or render.
        request: What is asked.
        size: Bytes that it takes in a message, at most.
        deadline_s: When the caller gives up, on the loop's clock.
        answer: The response, or a `RollwireError`; cancelled when the caller gave up.
        sends: How often it was sent.
    """

    call_id: int
    kind: str
    request: Any
    size: int
    deadline_s: float
    answer: asyncio.Future[Any]
    sends: int = 0


class CallBook:
    """The calls of one stream, across reconnects."""

    def __init__(self) -> None:
        self._next_id = 1
        self._unsent: deque[PendingCall] = deque()
        # Calls whose caller gave up stay until the server has answered: they count for its limit.
        self._sent: dict[int, PendingCall] = {}

    @property
    def waiting(self) -> bool:
        """Whether anyone waits for an answer."""
        return any(not call.answer.done() for call in (*self._unsent, *self._sent.values()))

    def add(self, kind: str, request: Any, deadline_s: float, answer: asyncio.Future[Any]) -> PendingCall:
        """Adds a call to those to be sent.

        Raises:
            RollwireError: RESOURCE_EXHAUSTED / `TRANSPORT`: it is larger than any message to an environment server.
        """
        size = request.ByteSize() + _CALL_OVERHEAD_BYTES
        if size > ENVIRONMENT_MESSAGE_BYTES:
            raise RollwireError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                Reason.TRANSPORT,
                f"the call has {size} bytes; allowed: at most {ENVIRONMENT_MESSAGE_BYTES}",
            )
        call = PendingCall(self._next_id, kind, request, size, deadline_s, answer)
        self._next_id += 1
        self._unsent.append(call)
        return call

    def next_message(self, now_s: float) -> pb.PlayRequest | None:
        """Returns a message of the calls that wait, as many as it may hold; None when none can be sent now.

        Args:
            now_s: The time, on the clock of the deadlines.
        """
        message = pb.PlayRequest()
        room = ENVIRONMENT_MESSAGE_BYTES
        places = most = max(SMALL_MESSAGE_CALLS, len(self._unsent) // _SHARE)
        while self._unsent and places and len(self._sent) < MAX_UNANSWERED_CALLS:
            pending = self._unsent[0]
            remaining_s = pending.deadline_s - now_s
            if pending.answer.done() or remaining_s <= 0:
                self._unsent.popleft()
                continue
            room -= pending.size
            if room < 0 and places < most:
                break
            places -= 1
            self._unsent.popleft()
            _write(message.calls.add(), pending, min(remaining_s, _MAX_TIMEOUT_S))
            pending.sends += 1
            self._sent[pending.call_id] = pending
        return message if places < most else None

    def answered(self, call_id: int) -> PendingCall | None:
        """Takes out the call with this number; None when no such call is unanswered."""
        return self._sent.pop(call_id, None)

    def repeat(self) -> list[PendingCall]:
        """Puts what was sent over a lost stream back, in order; returns the calls that were sent too often."""
        given_up: list[PendingCall] = []
        for call in reversed(self._sent.values()):
            if call.answer.done():
                continue
            if call.sends >= MAX_SENDS:
                given_up.append(call)
            else:
                self._unsent.appendleft(call)
        self._sent.clear()
        return given_up

    def take_sent(self) -> list[PendingCall]:
        """Takes out what was sent and not answered."""
        calls = [call for call in self._sent.values() if not call.answer.done()]
        self._sent.clear()
        return calls

    def take_all(self) -> list[PendingCall]:
        """Takes out everything."""
        calls = [*self.take_sent(), *(call for call in self._unsent if not call.answer.done())]
        self._unsent.clear()
        return calls


def _write(call: pb.SessionCall, pending: PendingCall, timeout_s: float) -> None:
    call.call_id = pending.call_id
    seconds = int(timeout_s)
    call.timeout.seconds = seconds
    call.timeout.nanos = max(int((timeout_s - seconds) * 1e9), 0 if seconds else 1)
    part = getattr(call, pending.kind)
    part.SetInParent()
    part.CopyFrom(pending.request)
