"""The receiver of a weight stream: manifest → chunks → commit, verified while it arrives.

Anything that is out of order, damaged, short or not what the manifest says is refused; until the commit is accepted and
every tensor's digest agrees, nothing may be used. No sockets, no torch.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from rollwire.rpc.digests import TensorHasher, tensor_hasher
from rollwire.rpc.limits import CHUNK_BYTES, MAX_CHUNK_BYTES
from rollwire.rpc.memory_file import FileMapping, SharedVersion
from rollwire.rpc.same_host import HandOverError, read_exactly
from rollwire.rpc.versions import version_text
from rollwire.rpc.weight_buffers import HostBuffers
from rollwire.rpc.weight_delta import UNCHANGED, SparseTensor, apply_sparse
from rollwire.rpc.weight_lanes import INLINE_BYTES, Lane, Lanes, default_threads
from rollwire.rpc.weight_low_rank import LowRank, LowRankBases, merge_low_rank
from rollwire.rpc.weight_manifest import (
    ELEMENT_BYTES,
    Base,
    HostTensor,
    TensorLayout,
    check_manifest,
    corrupt,
    full_manifest,
)
from rollwire.rpc.weight_steps import KEPT_CHANGES, Step, version_key
from rollwire.rpc.weight_wire import Chunk, read_response
from rollwire.v1 import weights_pb2

ALIGNMENT_BYTES: Final = 64
"""In the buffer every tensor begins at a multiple of this."""

_FULL: Final = weights_pb2.TENSOR_ENCODING_FULL
_UNCHANGED: Final = weights_pb2.TENSOR_ENCODING_UNCHANGED
_LOW_RANK: Final = weights_pb2.TENSOR_ENCODING_LOW_RANK


class HeldWeights:
    """A version that was received and verified completely.

    Attributes:
        version: The version.
        digest: `WeightManifest.digest` of it.
        tensor_digests: `TensorSpec.digest` of each tensor, by name.
        tensors: The tensors in the order they arrived; their memory is one buffer, see `release`.
        step: What changed from the base, where that was asked for and the version came so.
        low_rank: Adapters that tensors came as, beside `step`.
    """

    def __init__(
        self,
        manifest: weights_pb2.WeightManifest,
        tensors: dict[str, HostTensor],
        buffer: memoryview,
        buffers: HostBuffers,
        offsets: Mapping[str, int],
        step: Step | None = None,
        low_rank: Mapping[str, LowRank] | None = None,
    ) -> None:
        self.version = manifest.version
        self.digest = manifest.digest
        self.tensor_digests = {spec.name: spec.digest for spec in manifest.tensors}
        self.tensors = tensors
        self.step = step
        self.low_rank = low_rank if low_rank is not None else {}
        self._low_rank_bases = {spec.name: spec.low_rank_base_digest for spec in manifest.tensors}
        self._offsets = offsets
        self._buffer: memoryview | None = buffer
        self._buffers = buffers

    @property
    def base(self) -> Base:
        """What `check_manifest` needs to know of these weights as the base of the next update."""
        return Base(self.version, self.digest, self.tensor_digests)

    def manifest(self) -> weights_pb2.WeightManifest:
        """Describes these weights for another reader, without hashing them again."""
        layouts = {name: TensorLayout(tensor.dtype, tensor.shape) for name, tensor in self.tensors.items()}
        manifest = full_manifest(self.version, layouts, self.tensor_digests)
        for spec in manifest.tensors:
            spec.low_rank_base_digest = self._low_rank_bases[spec.name]
        return manifest

    def shared(self) -> SharedVersion | None:
        """Returns the file that the tensors lie in, in the manifest's order; None if they lie in private memory."""
        buffer = self._buffer
        if buffer is None or not isinstance(buffer.obj, FileMapping):
            return None
        return SharedVersion(self.manifest(), buffer.obj, [self._offsets[name] for name in self.tensors])

    def release(self) -> None:
        """Gives the memory back for the update after next; the tensors must not be used any more. Idempotent."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._buffers.give_back(buffer)


@dataclass(slots=True)
class _Slot:
    """Receives one tensor.

    `sink` takes payload bytes as they arrive: the tensor itself for a full payload, `payload` for another one.
    """

    spec: weights_pb2.TensorSpec
    target: memoryview
    payload: bytearray
    sink: memoryview
    lane: Lane
    hasher: TensorHasher
    change: SparseTensor | None = None
    low_rank: LowRank | None = None


class WeightAssembler:
    """Receives one stream into host memory beside the live weights, verifying while it receives.

    Hashing and patching run in a few threads behind `feed`, for large tensors only. Memory: one buffer of the version's
    size, the payloads of sparse tensors until they are applied, and for each thread the decoded payload of one tensor.
    The tensors lie in the buffer in the order of `expected`, each at the next multiple of `ALIGNMENT_BYTES`.

    The base is only read, so a broken stream leaves it as it was. Use as a context manager, or call `close` when a
    stream is given up; after `result` neither is needed.

    Args:
        expected: Layout of every tensor of the model, by name; a manifest must have exactly these.
        version: Version asked for.
        base: What is held and was named in `FetchWeightsRequest.have`.
        buffers: Where the memory comes from; by default a buffer of its own.
        threads: Worker threads; None for the machine's default, 0 for none.
        keep_changes: Keep the changes that arrive, for `HeldWeights.step`; at most `KEPT_CHANGES` of the version.
        low_rank_bases: What adapters are added to; named in `FetchWeightsRequest.low_rank_bases`. `result` brings it
            up to what the version shows.
        take_file: Returns the open file that the source has handed over; `SameHostOffer.take`. It stays open until
            `result` or `close` has returned.
    """

    def __init__(
        self,
        expected: Mapping[str, TensorLayout],
        version: weights_pb2.WeightVersion,
        *,
        base: HeldWeights | None = None,
        buffers: HostBuffers | None = None,
        threads: int | None = None,
        keep_changes: bool = False,
        low_rank_bases: LowRankBases | None = None,
        take_file: Callable[[], int] | None = None,
    ) -> None:
        self._bases = low_rank_bases if low_rank_bases is not None else LowRankBases()
        self._take_file = take_file
        self._keep_changes = keep_changes
        self._expected = expected
        self._version = version
        self._base = base
        self._buffers = buffers if buffers is not None else HostBuffers()
        self._threads = default_threads() if threads is None else threads
        self._manifest: weights_pb2.WeightManifest | None = None
        self._buffer: memoryview | None = None
        self._lanes = Lanes(0)
        self._slots: list[_Slot] = []
        self._starts: dict[str, int] = {}  # where each tensor lies in the buffer
        self._at = 0  # slot that the next payload byte belongs to
        self._filled = 0  # bytes that it has
        self._received = 0
        self._chunks: list[tuple[int, int, int]] = []  # offset, size and CRC-32 of each
        self._copied = False  # from a file, instead of chunks
        self._committed = False
        self._held: HeldWeights | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def received_bytes(self) -> int:
        """Payload bytes accepted so far; those of a file do not count."""
        return self._received

    @property
    def copied(self) -> bool:
        """True once the source has handed over a file."""
        return self._copied

    @property
    def digest(self) -> bytes:
        """Digest of the version, as the manifest gives it; empty before the manifest."""
        return self._manifest.digest if self._manifest is not None else b""

    def feed(self, message: weights_pb2.FetchWeightsResponse | bytes) -> None:
        """Accepts the next message, parsed or as it came over the wire.

        Raises:
            RollwireError: DATA_LOSS / `WEIGHTS_CORRUPT` or FAILED_PRECONDITION / `WEIGHTS_MISMATCH`; the assembler is
                useless from then on.
        """
        if self._committed:
            raise corrupt("a message follows the commit")
        response = read_response(message) if isinstance(message, bytes) else message
        if isinstance(response, Chunk):
            self._append(response)
            return
        part = response.WhichOneof("part")
        if part == "manifest":
            self._begin(response.manifest)
        elif part == "chunk":
            chunk = response.chunk
            self._append(Chunk(chunk.offset, chunk.crc32, memoryview(chunk.data)))
        elif part == "file":
            self._copy(response.file)
        elif part == "commit":
            self._finish(response.commit)
        else:
            raise corrupt("a message holds neither manifest nor chunk nor file nor commit")

    def tensors(self) -> dict[str, HostTensor]:
        """Returns the tensors of `result`."""
        return self.result().tensors

    def result(self) -> HeldWeights:
        """Waits until everything is verified and returns the version, whose memory now belongs to the result.

        Raises:
            RollwireError: DATA_LOSS / `WEIGHTS_CORRUPT` when the stream ended before its commit or a tensor is damaged.
        """
        if self._held is not None:
            return self._held
        if self._manifest is None or not self._committed or self._buffer is None:
            raise corrupt(f"the stream ended after {self._received} bytes, before its commit")
        try:
            self._lanes.join()
        except BaseException:
            self.close()
            raise
        tensors = {
            slot.spec.name: HostTensor(slot.spec.dtype, tuple(slot.spec.shape), slot.target) for slot in self._slots
        }
        self._bases.learn(self._manifest.tensors, tensors)
        low_rank = {slot.spec.name: slot.low_rank for slot in self._slots if slot.low_rank is not None}
        self._held = HeldWeights(
            self._manifest, tensors, self._buffer, self._buffers, self._starts, self._step(), low_rank
        )
        self._buffer = None
        return self._held

    def _step(self) -> Step | None:
        manifest = self._manifest
        assert manifest is not None
        if not self._keep_changes or not manifest.HasField("base"):
            return None
        changes = [slot.change for slot in self._slots]
        return Step(manifest.base, manifest.base_digest, version_key(manifest.version), changes)

    def close(self) -> None:
        """Stops the threads and gives the buffer back, unless `result` has handed it over. Idempotent."""
        self._lanes.close()
        self._committed = False
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._slots.clear()
            self._buffers.give_back(buffer)

    def _begin(self, manifest: weights_pb2.WeightManifest) -> None:
        if self._manifest is not None:
            raise corrupt("a second manifest arrived")
        if manifest.version != self._version:
            raise corrupt(
                f"the manifest is of version {version_text(manifest.version)}, "
                f"asked for was {version_text(self._version)}"
            )
        check_manifest(manifest, self._expected, self._base.base if self._base is not None else None)
        for spec in manifest.tensors:
            if spec.encoding == _LOW_RANK and self._bases.find(spec.name, spec.low_rank_base_digest) is None:
                wanted = spec.low_rank_base_digest.hex()[:16]
                raise corrupt(
                    f"tensor {spec.name} comes as adapters of weights with digest {wanted}, which are not kept here; "
                    "fetch the whole version"
                )
        change_bytes = sum(spec.payload_bytes for spec in manifest.tensors if spec.encoding != _FULL)
        whole_bytes = sum(spec.byte_size for spec in manifest.tensors)
        self._keep_changes = self._keep_changes and change_bytes <= KEPT_CHANGES * whole_bytes
        self._manifest = manifest
        end = 0
        for name, layout in self._expected.items():
            self._starts[name] = end
            end += -(-layout.byte_size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._buffer = self._buffers.take(end)
        self._lanes = Lanes(self._threads if end >= INLINE_BYTES else 0)
        for spec in manifest.tensors:
            start = self._starts[spec.name]
            target = self._buffer[start : start + spec.byte_size]
            payload = bytearray(0 if spec.encoding == _FULL else spec.payload_bytes)
            sink = target if spec.encoding == _FULL else memoryview(payload)
            self._slots.append(_Slot(spec, target, payload, sink, self._lanes.lane(spec.byte_size), tensor_hasher()))
        self._complete_empty()

    def _append(self, chunk: Chunk) -> None:
        manifest = self._manifest
        if manifest is None or self._copied:
            raise corrupt("a chunk arrived before the manifest, or beside a file")
        size = chunk.data.nbytes
        if chunk.offset != self._received:
            raise corrupt(f"a chunk starts at byte {chunk.offset}, expected was byte {self._received}")
        if not 0 < size <= MAX_CHUNK_BYTES or self._received + size > manifest.payload_bytes:
            raise corrupt(
                f"a chunk of {size} bytes at byte {chunk.offset}; allowed: 1 to {MAX_CHUNK_BYTES} bytes, "
                f"{manifest.payload_bytes} in all"
            )
        # A full payload is covered by its tensor's digest: checking both would cost time at every byte. There the
        # CRC-32 serves to name the damaged chunk.
        if manifest.HasField("base") and zlib.crc32(chunk.data) != chunk.crc32:
            raise corrupt(f"the checksum of the chunk at byte {chunk.offset} differs")
        self._lanes.check()
        self._chunks.append((chunk.offset, size, chunk.crc32))
        self._received += size
        rest = chunk.data
        while rest:
            rest = rest[self._fill(rest) :]
            self._complete_empty()

    def _fill(self, rest: memoryview) -> int:
        """Gives the slot at hand as much as it takes; returns how much that was."""
        slot = self._slots[self._at]
        start = self._filled
        self._filled = min(start + rest.nbytes, slot.sink.nbytes)
        piece = slot.sink[start : self._filled]
        piece[:] = rest[: piece.nbytes]
        if slot.spec.encoding == _FULL:
            slot.lane.submit(slot.hasher.update, piece)
        return piece.nbytes

    def _copy(self, file: weights_pb2.WeightFile) -> None:
        """Starts to copy all tensors from a file that was handed over."""
        manifest, again, self._copied = self._manifest, self._copied, True
        if manifest is None or self._received or again or self._take_file is None:
            raise corrupt("a file was handed over that was not asked for, or not in its place")
        if len(file.tensor_offsets) != len(self._slots) or manifest.HasField("base"):
            raise corrupt(f"{len(file.tensor_offsets)} tensors were handed over, the manifest has {len(self._slots)}")
        try:
            descriptor = self._take_file()
        except HandOverError as error:
            raise corrupt(f"the weights were not handed over: {error}") from error
        for slot, offset in zip(self._slots, file.tensor_offsets, strict=True):
            slot.lane.submit(self._copy_slot, slot, descriptor, offset)

    def _copy_slot(self, slot: _Slot, descriptor: int, offset: int) -> None:
        """Copies and verifies one tensor; runs in a lane."""
        for start in range(0, slot.target.nbytes, CHUNK_BYTES):
            piece = slot.target[start : start + CHUNK_BYTES]
            try:
                read_exactly(descriptor, piece, offset + start)
            except HandOverError as error:
                raise corrupt(f"tensor {slot.spec.name} was not handed over: {error}") from error
            slot.hasher.update(piece)
        self._verify(slot)

    def _complete_empty(self) -> None:
        """Finishes the slots that need no more bytes."""
        while self._at < len(self._slots) and self._filled == self._slots[self._at].sink.nbytes:
            slot = self._slots[self._at]
            if slot.spec.encoding == _FULL:
                slot.lane.submit(self._verify, slot)
            else:
                slot.lane.submit(self._patch, slot)
            self._at += 1
            self._filled = 0

    def _patch(self, slot: _Slot) -> None:
        """Makes the tensor from the base's; runs in a lane."""
        assert self._base is not None
        spec = slot.spec
        if spec.encoding == _LOW_RANK:
            self._merge(slot)
            return
        np.copyto(np.frombuffer(slot.target, np.uint8), np.frombuffer(self._base.tensors[spec.name].data, np.uint8))
        if spec.encoding == _UNCHANGED:  # its digest is the base's: `check_manifest` compared them
            slot.change = UNCHANGED
            return
        change = SparseTensor(spec.encoding, spec.changed_elements, spec.sparse_bytes, slot.payload)
        apply_sparse(slot.target, ELEMENT_BYTES[spec.dtype], change)
        if self._keep_changes:
            slot.change = change
        slot.payload, slot.sink = bytearray(), memoryview(b"")
        slot.hasher.update(slot.target)
        self._verify(slot)

    def _merge(self, slot: _Slot) -> None:
        """Makes the tensor from adapters and what they are added to; runs in a lane."""
        spec = slot.spec
        base = self._bases.find(spec.name, spec.low_rank_base_digest)
        assert base is not None, "checked with the manifest"
        change = LowRank(spec.low_rank_base_digest, spec.low_rank, slot.payload)
        merge_low_rank(slot.target, base, TensorLayout(spec.dtype, tuple(spec.shape)), change)
        if self._keep_changes:
            slot.low_rank = change
        slot.payload, slot.sink = bytearray(), memoryview(b"")
        slot.hasher.update(slot.target)
        self._verify(slot)

    def _verify(self, slot: _Slot) -> None:
        """Compares the tensor's digest; runs in a lane."""
        if slot.hasher.digest() != slot.spec.digest:
            raise corrupt(f"the digest of tensor {slot.spec.name} differs{self._damage(slot)}")

    def _damage(self, slot: _Slot) -> str:
        """Says which chunk of a full payload is damaged, if its checksum shows it."""
        if slot.spec.encoding != _FULL or self._copied:
            return ""
        first, last = slot.spec.payload_offset, slot.spec.payload_offset + slot.spec.payload_bytes
        for offset, size, crc32 in self._chunks:
            inside = first <= offset and offset + size <= last
            if inside and zlib.crc32(slot.target[offset - first : offset - first + size]) != crc32:
                return f": the chunk at byte {offset} is damaged"
        return ""

    def _finish(self, commit: weights_pb2.WeightCommit) -> None:
        manifest = self._manifest
        if manifest is None:
            raise corrupt("the commit arrived before the manifest")
        complete = self._copied or self._received == manifest.payload_bytes
        if not complete or commit.payload_bytes != manifest.payload_bytes:
            raise corrupt(f"{self._received} bytes arrived, the manifest announced {manifest.payload_bytes}")
        if commit.digest != manifest.digest:
            raise corrupt("the digest of the commit differs from the manifest's")
        self._committed = True


async def receive_weights(
    responses: AsyncIterable[weights_pb2.FetchWeightsResponse | bytes], assembler: WeightAssembler
) -> HeldWeights:
    """Feeds a stream into an assembler without blocking the event loop; closes the assembler on any failure.

    Raises:
        RollwireError: As `WeightAssembler.feed` and `WeightAssembler.result`, or what reading the stream raises.
    """
    try:
        async for response in responses:
            assembler.feed(response)
        return await asyncio.to_thread(assembler.result)
    except BaseException:
        await asyncio.to_thread(assembler.close)
        raise
