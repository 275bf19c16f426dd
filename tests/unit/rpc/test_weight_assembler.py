"""Delta streams and host buffers: a broken update leaves the base as it was, whatever is wrong with it (I3)."""

from __future__ import annotations

import threading
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.rpc.digests import weights_digest
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.weight_assembler import ALIGNMENT_BYTES
from rollwire.rpc.weight_buffers import BuffersExhaustedError, HostBuffers, anonymous_memory
from rollwire.rpc.weight_delta import supported_encodings
from rollwire.rpc.weight_manifest import Base, check_manifest
from rollwire.rpc.weight_publisher import WeightPublisher
from rollwire.rpc.weight_stream import HeldWeights, TensorLayout, WeightAssembler, receive_weights, stream_wire
from rollwire.v1 import weights_pb2

BF16, F32, I64 = weights_pb2.DATA_TYPE_BFLOAT16, weights_pb2.DATA_TYPE_FLOAT32, weights_pb2.DATA_TYPE_INT64
LAYOUTS = {
    "same": TensorLayout(BF16, (40,)),
    "few": TensorLayout(BF16, (60, 70)),
    "masters": TensorLayout(F32, (900,)),
    "many": TensorLayout(BF16, (30,)),
    "count": TensorLayout(I64, (60,)),
}
WIDTHS: dict[Any, Any] = {BF16: "<u2", F32: "<u4", I64: "<u8"}


@dataclass(repr=False)
class Update:
    """A base that is held and the parts of a delta stream that follows it."""

    base: HeldWeights
    buffers: HostBuffers
    manifest: weights_pb2.WeightManifest
    payload: bytes
    expected: dict[str, bytes]

    def receive(self, messages: Any, threads: int = 0) -> HeldWeights:
        """Feeds messages; a failed assembler is closed."""
        assembler = WeightAssembler(LAYOUTS, _version(1), base=self.base, buffers=self.buffers, threads=threads)
        with assembler:
            for message in messages:
                assembler.feed(message)
            return assembler.result()

    def messages(self, chunk_bytes: int = 100, payload: bytes | None = None) -> list[bytes]:
        """Returns the stream with chunks of another size or another payload, its checksums matching."""
        return list(stream_wire(self.manifest, iter([memoryview(payload or self.payload)]), chunk_bytes))

    def refused(self, messages: Any, threads: int = 0) -> RollwireError:
        """Asserts that the stream is refused, and that base and buffers are as they were."""
        before = {name: bytes(tensor.data) for name, tensor in self.base.tensors.items()}
        with pytest.raises(RollwireError) as caught:
            self.receive(messages, threads)
        assert {name: bytes(tensor.data) for name, tensor in self.base.tensors.items()} == before
        assert self.buffers.taken == 1
        return caught.value

    def refused_or_harmless(self, messages: Any) -> None:
        """Asserts that a damaged stream is refused, or brings the right weights all the same.

        The latter is possible: protobuf skips unknown fields, and a Zstandard frame has bits that mean nothing.
        """
        before = {name: bytes(tensor.data) for name, tensor in self.base.tensors.items()}
        try:
            held = self.receive(messages)
        except RollwireError as error:
            assert error.reason in (Reason.WEIGHTS_CORRUPT, Reason.WEIGHTS_MISMATCH)
        else:
            held.release()
            assert {name: bytes(tensor.data) for name, tensor in held.tensors.items()} == self.expected
        assert {name: bytes(tensor.data) for name, tensor in self.base.tensors.items()} == before
        assert self.buffers.taken == 1


def _version(step: int) -> weights_pb2.WeightVersion:
    return weights_pb2.WeightVersion(lineage="lineage-a", step=step)


def _publish(publisher: WeightPublisher, step: int, words: dict[str, np.ndarray]) -> None:
    publisher.publish(
        _version(step), ((name, LAYOUTS[name], [memoryview(part).cast("B")]) for name, part in words.items())
    )


def _update(compressed: bool = True) -> Update:
    generator = np.random.default_rng(0)
    words = {
        name: generator.integers(0, 256, layout.byte_size, dtype=np.uint8).view(WIDTHS[layout.dtype])
        for name, layout in LAYOUTS.items()
    }
    publisher = WeightPublisher(threads=0, delta_share=10)
    _publish(publisher, 0, words)
    buffers = HostBuffers()
    with WeightAssembler(LAYOUTS, _version(0), buffers=buffers, threads=0) as assembler:
        for message in publisher.open(weights_pb2.FetchWeightsRequest()):
            assembler.feed(message)
        base = assembler.result()
    for name, share in (("few", 0.05), ("masters", 0.05), ("many", 1.0), ("count", 0.05)):
        part = words[name]
        part[generator.choice(len(part), int(share * len(part)), replace=False)] += 1
    _publish(publisher, 1, words)
    accepted = [encoding for encoding in supported_encodings() if compressed or encoding != 4]
    stream = publisher.open(weights_pb2.FetchWeightsRequest(have=_version(0), accepted_encodings=accepted))
    chunks = [weights_pb2.FetchWeightsResponse.FromString(message).chunk.data for message in stream]
    return Update(base, buffers, stream.manifest, b"".join(chunks), {k: v.tobytes() for k, v in words.items()})


PACKED, PLAIN = _update(), _update(compressed=False)
UPDATES = st.sampled_from([PACKED, PLAIN])


def test_the_updates_of_these_tests_have_every_encoding() -> None:
    assert {spec.encoding for update in (PACKED, PLAIN) for spec in update.manifest.tensors} == {1, 2, 3, 4}


@given(update=UPDATES, chunk_bytes=st.integers(1, 3000), threads=st.sampled_from([0, 1, 3]))
@settings(max_examples=60, deadline=None)
def test_a_delta_arrives_bit_for_bit(update: Update, chunk_bytes: int, threads: int) -> None:
    held = update.receive(update.messages(chunk_bytes), threads)
    assert {name: bytes(tensor.data) for name, tensor in held.tensors.items()} == update.expected
    assert held.digest == update.manifest.digest
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in held.tensors.items()} == {
        name: (layout.dtype, layout.shape) for name, layout in LAYOUTS.items()
    }
    held.release()
    assert update.buffers.taken == 1


@given(update=UPDATES, data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_flipped_bit_anywhere_in_the_messages_is_refused_or_harmless(update: Update, data: st.DataObject) -> None:
    messages = update.messages()
    at = data.draw(st.integers(0, len(messages) - 1))
    damaged = bytearray(messages[at])
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    messages[at] = bytes(damaged)
    update.refused_or_harmless(messages)


@given(update=UPDATES, data=st.data())
@settings(max_examples=300, deadline=None)
def test_damage_with_matching_checksums_is_refused_or_harmless(update: Update, data: st.DataObject) -> None:
    payload = bytearray(update.payload)
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= data.draw(st.integers(1, 255))
    update.refused_or_harmless(update.messages(payload=bytes(payload)))


def test_a_damaged_chunk_of_a_delta_is_named() -> None:
    messages = PACKED.messages()
    messages[2] = bytes((*messages[2][:40], messages[2][40] ^ 1, *messages[2][41:]))
    assert "checksum of the chunk at byte 100" in PACKED.refused(messages).message


@pytest.mark.parametrize("update", [PACKED, PLAIN], ids=["zstd", "plain"])
def test_a_stream_cut_at_or_near_any_tensor_boundary_is_refused(update: Update) -> None:
    ends = {spec.payload_offset + spec.payload_bytes for spec in update.manifest.tensors}
    for cut in sorted({end + near for end in ends for near in (-1, 0, 1)}):
        if 0 <= cut < len(update.payload):
            assert "before its commit" in update.refused(update.messages(1)[: cut + 1]).message
            shorter = list(stream_wire(update.manifest, iter([memoryview(update.payload)[:cut]]), 100))
            assert "bytes arrived" in update.refused(shorter).message


@given(update=UPDATES, data=st.data())
@settings(max_examples=600, deadline=None)
def test_a_lying_manifest_is_refused_whatever_its_numbers(update: Update, data: st.DataObject) -> None:
    manifest = weights_pb2.WeightManifest()
    manifest.CopyFrom(update.manifest)
    number = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1), st.sampled_from([1 << 31, 1 << 32, 1 << 63]))
    spec = data.draw(st.sampled_from(list(manifest.tensors)))
    for field in data.draw(st.lists(st.sampled_from(_NUMBERS), min_size=1, max_size=4)):
        if field == "encoding":
            spec.encoding = data.draw(st.integers(0, 5))  # type: ignore[assignment]
        else:
            setattr(spec, field, data.draw(number))
    if data.draw(st.booleans()):
        _settle(manifest)
    messages = list(stream_wire(manifest, iter([memoryview(update.payload)]), 500))
    tracemalloc.start()
    try:
        held = update.receive(messages)
    except RollwireError as error:
        assert error.reason == Reason.WEIGHTS_CORRUPT
    else:
        assert manifest == update.manifest
        held.release()
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 1 << 20
    assert update.buffers.taken == 1


_NUMBERS = ["encoding", "byte_size", "payload_offset", "payload_bytes", "changed_elements", "sparse_bytes"]


def _settle(manifest: weights_pb2.WeightManifest) -> None:
    """Makes offsets and sum agree with the payload sizes, so that the lie is found later."""
    offset = 0
    for spec in manifest.tensors:
        spec.payload_offset = offset % (1 << 64)
        offset += spec.payload_bytes
    manifest.payload_bytes = offset % (1 << 64)


def _another_base(manifest: weights_pb2.WeightManifest) -> None:
    manifest.base.step = 5


def _another_digest(manifest: weights_pb2.WeightManifest) -> None:
    manifest.base_digest = bytes(32)


def _no_base(manifest: weights_pb2.WeightManifest) -> None:
    manifest.ClearField("base")


def _no_base_and_no_digest(manifest: weights_pb2.WeightManifest) -> None:
    manifest.ClearField("base")
    manifest.ClearField("base_digest")


def _unchanged_but_other(manifest: weights_pb2.WeightManifest) -> None:
    manifest.tensors[0].digest = bytes(32)
    manifest.digest = weights_digest((spec.name, spec.digest) for spec in manifest.tensors)


@pytest.mark.parametrize(
    "lie", [_another_base, _another_digest, _no_base, _no_base_and_no_digest, _unchanged_but_other]
)
def test_a_delta_against_anything_but_what_is_held_is_refused(lie: Callable[[Any], None]) -> None:
    manifest = weights_pb2.WeightManifest()
    manifest.CopyFrom(PACKED.manifest)
    lie(manifest)
    first = next(stream_wire(manifest, iter([memoryview(PACKED.payload)]), 500))
    assembler = WeightAssembler(LAYOUTS, _version(1), base=PACKED.base, buffers=PACKED.buffers, threads=0)
    with pytest.raises(RollwireError) as caught:
        assembler.feed(first)
    assert caught.value.reason == Reason.WEIGHTS_CORRUPT
    assert PACKED.buffers.taken == 1


@pytest.mark.parametrize(("encoding", "payload_bytes"), [(3, 60), (3, 90), (4, 60), (4, 89)])
def test_a_sparse_payload_as_long_as_its_tensor_is_refused(encoding: Any, payload_bytes: int) -> None:
    layout = TensorLayout(BF16, (30,))
    spec = weights_pb2.TensorSpec(name="t", dtype=BF16, shape=[30], byte_size=60, encoding=encoding)
    spec.changed_elements = 10
    spec.payload_bytes, spec.sparse_bytes = payload_bytes, 60 if payload_bytes == 60 and encoding == 3 else 90
    manifest = weights_pb2.WeightManifest(version=_version(1), base=_version(0), base_digest=b"d", tensors=[spec])
    manifest.payload_bytes = payload_bytes
    manifest.digest = weights_digest([("t", b"")])
    base = Base(_version(0), b"d", {"t": b""})
    with pytest.raises(RollwireError, match="do not fit together"):
        check_manifest(manifest, {"t": layout}, base)
    spec.payload_bytes = manifest.payload_bytes = manifest.tensors[0].payload_bytes = 50
    manifest.tensors[0].sparse_bytes = 50 if encoding == 3 else 90
    check_manifest(manifest, {"t": layout}, base)


def test_a_reader_that_holds_nothing_refuses_a_delta() -> None:
    with pytest.raises(RollwireError, match=r"held is none .*; fetch the whole version"):
        WeightAssembler(LAYOUTS, _version(1)).feed(PACKED.messages()[0])


def test_held_weights_can_be_passed_on_without_hashing_them() -> None:
    held = PACKED.receive(PACKED.messages())
    messages = list(stream_wire(held.manifest(), (tensor.data for tensor in held.tensors.values()), 500))
    with WeightAssembler(LAYOUTS, _version(1), threads=0) as assembler:
        for message in messages:
            assembler.feed(message)
        assert {name: bytes(part.data) for name, part in assembler.tensors().items()} == PACKED.expected
    held.release()


# Large tensors: threads.

LARGE = {"a": TensorLayout(BF16, (700_000,)), "b": TensorLayout(BF16, (300_000,)), "c": TensorLayout(BF16, (9,))}


def _large_stream() -> list[bytes]:
    publisher = WeightPublisher(threads=0, chunk_bytes=1 << 16)
    tensors = ((name, layout, [memoryview(bytes(layout.byte_size))]) for name, layout in LARGE.items())
    publisher.publish(_version(1), tensors)
    return list(publisher.open(weights_pb2.FetchWeightsRequest()))


@pytest.mark.parametrize("threads", [0, 1, 2, 5])
def test_damage_is_traced_to_its_chunk_and_no_thread_stays(threads: int) -> None:
    messages = _large_stream()
    damaged = bytearray(messages[5])
    damaged[1000] ^= 1
    messages[5] = bytes(damaged)
    buffers, before = HostBuffers(), threading.active_count()
    with pytest.raises(RollwireError, match=f"digest of tensor a differs: the chunk at byte {4 << 16} is damaged"):  # noqa: SIM117
        with WeightAssembler(LARGE, _version(1), buffers=buffers, threads=threads) as assembler:
            for message in messages:
                assembler.feed(message)
            assembler.result()
    assert threading.active_count() == before
    assert buffers.taken == 0


def test_a_result_that_is_refused_frees_everything() -> None:
    messages = _large_stream()
    damaged = bytearray(messages[-3])
    damaged[1000] ^= 1
    messages[-3] = bytes(damaged)
    buffers = HostBuffers()
    assembler = WeightAssembler(LARGE, _version(1), buffers=buffers, threads=2)
    for message in messages:
        assembler.feed(message)
    for text in ("differs", "before its commit"):
        with pytest.raises(RollwireError, match=text):
            assembler.result()
    assert buffers.taken == 0


async def test_receiving_from_a_source_that_breaks_frees_everything() -> None:
    buffers, before = HostBuffers(), threading.active_count()

    async def responses() -> AsyncIterator[bytes]:
        for message in _large_stream()[:10]:
            yield message
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await receive_weights(responses(), WeightAssembler(LARGE, _version(1), buffers=buffers, threads=2))
    assert buffers.taken == 0
    assert len([thread for thread in threading.enumerate() if thread.name.startswith("weights")]) == 0
    assert threading.active_count() <= before + 1  # the event loop's own helper


async def test_receiving_returns_the_version() -> None:
    async def responses() -> AsyncIterator[bytes]:
        for message in _large_stream():
            yield message

    held = await receive_weights(responses(), WeightAssembler(LARGE, _version(1)))
    assert held.version == _version(1)
    assert all(not any(tensor.data) for tensor in held.tensors.values())


def test_checksums_of_full_streams_are_those_of_the_chunks() -> None:
    for message in _large_stream():
        response = weights_pb2.FetchWeightsResponse.FromString(message)
        if response.HasField("chunk"):
            assert response.chunk.crc32 == zlib.crc32(response.chunk.data)


# Buffers.


def test_buffers_alternate_and_a_third_one_is_refused() -> None:
    made: list[int] = []

    def allocate(size_bytes: int) -> memoryview:
        made.append(size_bytes)
        return anonymous_memory(size_bytes)

    buffers = HostBuffers(allocate)
    first, second = buffers.take(100), buffers.take(100)
    with pytest.raises(BuffersExhaustedError, match="release one first"):
        buffers.take(100)
    buffers.give_back(first)
    assert buffers.take(90).obj is first.obj
    buffers.give_back(second)
    assert buffers.take(200).nbytes == 200  # too small: another one instead
    assert made == [100, 100, 200]


def test_an_allocation_that_fails_takes_nothing() -> None:
    def allocate(size_bytes: int) -> memoryview:
        raise MemoryError

    buffers = HostBuffers(allocate)
    with pytest.raises(MemoryError):
        buffers.take(1)
    assert buffers.taken == 0


def test_releasing_twice_gives_back_once() -> None:
    held = PACKED.receive(PACKED.messages())
    assert PACKED.buffers.taken == 2
    held.release()
    held.release()
    assert PACKED.buffers.taken == 1


def test_tensors_lie_in_the_buffer_in_the_order_of_the_model_whatever_the_order_on_the_wire() -> None:
    memory = anonymous_memory(1 << 20)
    layouts = {name: LAYOUTS[name] for name in sorted(LAYOUTS)}
    assert list(layouts) != list(LAYOUTS)
    held = PACKED.receive(PACKED.messages())
    messages = list(stream_wire(held.manifest(), (tensor.data for tensor in held.tensors.values()), 500))
    held.release()
    with WeightAssembler(layouts, _version(1), buffers=HostBuffers(lambda _: memory), threads=0) as assembler:
        for message in messages:
            assembler.feed(message)
        assert {name: bytes(part.data) for name, part in assembler.tensors().items()} == PACKED.expected
    start = 0
    for name, layout in layouts.items():
        assert bytes(memory[start : start + layout.byte_size]) == PACKED.expected[name]
        start += -(-layout.byte_size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
