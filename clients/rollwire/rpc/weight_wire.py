"""The bulk method's own wire code: `FetchWeights` messages as bytes, without protobuf's copies.

A chunk is one `bytes` field with a few bytes around it, so it is written and read by hand here. What is written is a
valid `FetchWeightsResponse` for any protobuf reader, and what the reader here does not recognise is left to protobuf.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from rollwire.rpc.weight_manifest import corrupt
from rollwire.v1 import weights_pb2

WEIGHTS_SERVICE: Final = "rollwire.v1.WeightsService"
_METHOD: Final = "FetchWeights"
# Tags: field number and wire type. The tests check them against the generated code.
_CHUNK: Final = 0x12
_OFFSET: Final = 0x08
_CRC32: Final = 0x15
_DATA: Final = 0x1A
_CRC32_FORM: Final = struct.Struct("<I")
_MAX_VARINT_BYTES: Final = 10


@dataclass(frozen=True, slots=True)
class Chunk:
    """A received chunk; `data` lies inside the message it came in."""

    offset: int
    crc32: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class WireChunk:
    """A chunk ready to be sent.

    Attributes:
        message: Serialised `FetchWeightsResponse`. The payload begins 8 bytes in when it has from 16 KiB to
            almost 2 MiB, which keeps its elements aligned.
        start: Where the payload begins.
        size: Length of the payload.
        offset: `WeightChunk.offset`.
    """

    message: bytes
    start: int
    size: int
    offset: int

    @property
    def data(self) -> memoryview:
        """The payload."""
        return memoryview(self.message)[self.start : self.start + self.size]


def write_chunk(offset: int, parts: Sequence[memoryview], crc32: int | None = None) -> WireChunk:
    """Serialises a chunk whose payload is the concatenation of some parts, copying each once.

    Args:
        offset: `WeightChunk.offset`.
        parts: The parts.
        crc32: Checksum of the payload, if it is known.
    """
    size = sum(part.nbytes for part in parts)
    if crc32 is None:
        crc32 = crc32_of(parts)
    tail = bytes((_OFFSET,)) + _varint(offset) + bytes((_CRC32,)) + _CRC32_FORM.pack(crc32)
    inner = bytes((_DATA,)) + _varint(size)
    head = bytes((_CHUNK,)) + _varint(len(inner) + size + len(tail)) + inner
    return WireChunk(b"".join((head, *parts, tail)), len(head), size, offset)


def crc32_of(parts: Iterable[memoryview]) -> int:
    """Returns `WeightChunk.crc32` of the concatenation of some parts."""
    crc32 = 0
    for part in parts:
        crc32 = zlib.crc32(part, crc32)
    return crc32


def write_manifest(manifest: weights_pb2.WeightManifest) -> bytes:
    """Serialises the first message of a stream."""
    return weights_pb2.FetchWeightsResponse(manifest=manifest).SerializeToString()


def write_commit(manifest: weights_pb2.WeightManifest) -> bytes:
    """Serialises the last message of a stream."""
    commit = weights_pb2.WeightCommit(digest=manifest.digest, payload_bytes=manifest.payload_bytes)
    return weights_pb2.FetchWeightsResponse(commit=commit).SerializeToString()


def write_chunks(payloads: Iterator[memoryview], chunk_bytes: int) -> Iterator[WireChunk]:
    """Cuts payloads into chunks that run across them; a part is copied once, when its chunk is full."""
    offset = filled = 0
    parts: list[memoryview] = []
    for payload in payloads:
        position = 0
        while position < payload.nbytes:
            part = payload[position : position + chunk_bytes - filled]
            parts.append(part)
            position += part.nbytes
            filled += part.nbytes
            if filled == chunk_bytes:
                yield write_chunk(offset, parts)
                offset += filled
                filled = 0
                parts = []
    if parts:
        yield write_chunk(offset, parts)


def read_response(message: bytes) -> Chunk | weights_pb2.FetchWeightsResponse:
    """Parses one message of a stream.

    Raises:
        RollwireError: DATA_LOSS / `WEIGHTS_CORRUPT`: it is not a `FetchWeightsResponse`.
    """
    chunk = read_chunk(message)
    if chunk is not None:
        return chunk
    try:
        return weights_pb2.FetchWeightsResponse.FromString(message)
    except DecodeError as error:
        raise corrupt("a message of the weight stream is not a valid FetchWeightsResponse") from error


def read_chunk(message: bytes) -> Chunk | None:
    """Parses a message that holds a chunk and nothing else; None for any other, also a malformed one."""
    if not message or message[0] != _CHUNK:
        return None
    length, at = _read_varint(message, 1)
    if at + length != len(message):
        return None
    offset = crc32 = 0
    payload = memoryview(b"")
    while at < len(message):
        tag = message[at]
        at += 1
        if tag == _CRC32 and at + _CRC32_FORM.size <= len(message):
            (crc32,) = _CRC32_FORM.unpack_from(message, at)
            at += _CRC32_FORM.size
        elif tag == _OFFSET:
            offset, at = _read_varint(message, at)
        elif tag == _DATA:
            size, at = _read_varint(message, at)
            payload = memoryview(message)[at : at + size]
            at += size
        else:
            return None
        if at > len(message):
            return None
    return Chunk(offset, crc32, payload)


def add_fetch_weights_to_server(
    fetch_weights: Callable[[weights_pb2.FetchWeightsRequest, Any], AsyncIterator[bytes]], server: grpc.aio.Server
) -> None:
    """Adds `WeightsService` with a `FetchWeights` that yields serialised messages to a server that has not started."""
    handler = grpc.unary_stream_rpc_method_handler(
        fetch_weights, request_deserializer=weights_pb2.FetchWeightsRequest.FromString, response_serializer=None
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(WEIGHTS_SERVICE, {_METHOD: handler}),))


def fetch_weights_method(channel: grpc.aio.Channel) -> Any:
    """Returns the callable of `FetchWeights` whose responses are serialised messages, for `WeightAssembler.feed`."""
    return channel.unary_stream(
        f"/{WEIGHTS_SERVICE}/{_METHOD}",
        request_serializer=weights_pb2.FetchWeightsRequest.SerializeToString,
        response_deserializer=None,
    )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Returns value and following position; a position past the end of the message says that it is malformed."""
    value = 0
    for position in range(at, min(at + _MAX_VARINT_BYTES, len(message))):
        byte = message[position]
        value |= (byte & 0x7F) << 7 * (position - at)
        if byte < 0x80 and value < 1 << 64:
            return value, position + 1
    return 0, len(message) + 1
