"""Frames between the server, a zygote and its workers: length, kind, payload. Nothing is ever pickled.

A frame is four bytes of payload length, one byte of kind, and the payload: a message of the contract, or JSON.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final

from rollwire.rpc.limits import ENVIRONMENT_MESSAGE_BYTES

MAX_PAYLOAD_BYTES: Final = ENVIRONMENT_MESSAGE_BYTES
"""Largest payload in either direction: a call or a reply as the contract bounds them."""

_HEADER: Final = struct.Struct(">IB")


class Kind(IntEnum):
    """What a frame holds."""

    SETUP = 1
    """Server to zygote: JSON of a `ProcessSetup`."""

    READY = 2
    """Zygote to server: an `EnvironmentDescription`; the environment can be used."""

    REFUSED = 3
    """Zygote to server: one line of text that says why the environment cannot be used."""

    FORK = 4
    """Server to zygote: JSON {worker}, with the worker's end of a connection as a descriptor."""

    KILL = 5
    """Server to zygote: JSON {worker}."""

    FORKED = 6
    """Zygote to server: JSON {worker, pid}."""

    ENDED = 7
    """Zygote to server: JSON {worker, how, output}; the worker and all that it left behind are gone."""

    STARTED = 8
    """Worker to server: it answers calls from now on. Empty."""

    CALL = 9
    """Server to worker: a `SessionCall`."""

    REPLY = 10
    """Worker to server: a `SessionReply`. Calls are answered in the order in which they came."""

    LEARNED = 11
    """Worker to server, before a reply: an `EnvironmentDescription` with the aggregation of further metrics."""

    STACK = 12
    """Worker to server, before a reply: stack trace of an error, for the log. Text."""


class FrameError(Exception):
    """The peer sent what is no frame."""


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """Returns a frame. Raises `FrameError` when the payload is too long."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise FrameError(f"a payload has {len(payload)} bytes; allowed: at most {MAX_PAYLOAD_BYTES}")
    return _HEADER.pack(len(payload), kind) + payload


class FrameReader:
    """Takes a stream of bytes apart. Never holds more than one frame and what was fed last."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """Yields the frames that are complete now.

        Args:
            data: What arrived.

        Raises:
            FrameError: It is no frame.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                length, number = _HEADER.unpack_from(self._buffer, start)
                if length > MAX_PAYLOAD_BYTES or not Kind.SETUP <= number <= Kind.STACK:
                    raise FrameError(
                        f"a frame of kind {number} and {length} bytes; allowed: kinds 1 to {int(Kind.STACK)}"
                    )
                end = start + _HEADER.size + length
                if end > len(self._buffer):
                    break
                payload = bytes(self._buffer[start + _HEADER.size : end])
                start = end
                yield Kind(number), payload
        finally:
            del self._buffer[:start]
