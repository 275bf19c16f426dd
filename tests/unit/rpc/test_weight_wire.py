"""The hand-written wire code says the same as protobuf, or leaves the message to protobuf."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.weight_wire import Chunk, read_chunk, read_response, write_chunk, write_chunks
from rollwire.v1 import weights_pb2

Response = weights_pb2.FetchWeightsResponse


@given(
    offset=st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1)),
    parts=st.lists(st.binary(max_size=20_000), min_size=1, max_size=4).filter(any),
)
@settings(max_examples=300, deadline=None)
def test_written_chunks_are_valid_protobuf(offset: int, parts: list[bytes]) -> None:
    payload = b"".join(parts)
    chunk = write_chunk(offset, [memoryview(part) for part in parts])
    parsed = Response.FromString(chunk.message)
    assert parsed == Response(chunk=weights_pb2.WeightChunk(offset=offset, crc32=zlib.crc32(payload), data=payload))
    assert chunk.data == payload
    assert read_chunk(chunk.message) == Chunk(offset, zlib.crc32(payload), memoryview(payload))


@pytest.mark.parametrize("size", [1 << 14, 1 << 20, (2 << 20) - 64])
def test_payloads_of_usual_chunks_are_aligned(size: int) -> None:
    assert write_chunk(5 << 40, [memoryview(bytes(size))]).start == 8


@given(offset=st.integers(0, 2**64 - 1), crc32=st.integers(0, 2**32 - 1), data=st.binary(max_size=300))
def test_chunks_of_other_senders_are_read(offset: int, crc32: int, data: bytes) -> None:
    chunk = weights_pb2.WeightChunk(offset=offset, crc32=crc32, data=data)
    assert read_chunk(Response(chunk=chunk).SerializeToString()) == Chunk(offset, crc32, memoryview(data))


def test_other_messages_are_left_to_protobuf() -> None:
    unknown_field = weights_pb2.WeightChunk(data=b"x").SerializeToString() + b"\x30\x01"
    for message in (
        Response(manifest=weights_pb2.WeightManifest(payload_bytes=3)),
        Response(commit=weights_pb2.WeightCommit(payload_bytes=3)),
        Response(chunk=weights_pb2.WeightChunk.FromString(unknown_field)),
        Response(),
    ):
        assert read_chunk(message.SerializeToString()) is None
        assert read_response(message.SerializeToString()) == message


_VALID = write_chunk(77, [memoryview(bytes(range(200)))]).message


@given(message=st.one_of(st.binary(max_size=60), st.binary(max_size=40).map(lambda tail: b"\x12" + tail)))
@example(_VALID + _VALID)
@example(b"\x12\x00")
@example(b"")
@example(b"\x12\x0b\x08" + b"\xff" * 9 + b"\x7f")
@settings(max_examples=1000, deadline=None)
def test_what_is_read_by_hand_is_what_protobuf_reads(message: bytes) -> None:
    _agrees_with_protobuf(message)


@given(at=st.integers(0, len(_VALID) - 1), byte=st.integers(0, 255), cut=st.integers(0, 3))
@settings(max_examples=1000, deadline=None)
def test_damaged_chunks_are_what_protobuf_reads(at: int, byte: int, cut: int) -> None:
    damaged = bytearray(_VALID[: len(_VALID) - cut])
    if at < len(damaged):
        damaged[at] = byte
    _agrees_with_protobuf(bytes(damaged))


def _agrees_with_protobuf(message: bytes) -> None:
    found = read_chunk(message)
    if found is not None:
        chunk = Response.FromString(message).chunk
        assert found == Chunk(chunk.offset, chunk.crc32, memoryview(chunk.data))
        return
    try:
        assert read_response(message) == Response.FromString(message)
    except RollwireError as error:
        assert error.reason == Reason.WEIGHTS_CORRUPT


@given(
    payloads=st.lists(st.binary(max_size=50), max_size=12),
    chunk_bytes=st.integers(1, 64),
)
@settings(max_examples=200, deadline=None)
def test_chunks_run_across_payloads_without_gaps(payloads: list[bytes], chunk_bytes: int) -> None:
    chunks = list(write_chunks((memoryview(payload) for payload in payloads), chunk_bytes))
    whole = b"".join(payloads)
    assert b"".join(chunk.data for chunk in chunks) == whole
    assert [chunk.offset for chunk in chunks] == list(range(0, len(whole), chunk_bytes))
    assert all(chunk.size == chunk_bytes for chunk in chunks[:-1])
