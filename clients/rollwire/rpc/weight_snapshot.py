"""One published version in host memory, and how it is made from the last one.

The next version is written over the present one, chunk by chunk: each new chunk is compared with the old bytes at its
place before they are overwritten. So there is never more than one whole version in memory, and no copy for each reader.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rollwire.rpc.digests import TensorHasher, tensor_hasher
from rollwire.rpc.memory_file import FileMapping, GrowingFile, SharedVersion
from rollwire.rpc.weight_delta import SparseEncoder, SparseTensor
from rollwire.rpc.weight_lanes import INLINE_BYTES, Lane, Lanes
from rollwire.rpc.weight_low_rank import LowRank
from rollwire.rpc.weight_manifest import ELEMENT_BYTES, TensorLayout, full_manifest
from rollwire.rpc.weight_pieces import PayloadChunk, Piece
from rollwire.rpc.weight_steps import SPARSE_LIMIT
from rollwire.rpc.weight_wire import crc32_of
from rollwire.v1 import weights_pb2


@dataclass
class Snapshot:
    """A version in a file.

    Attributes:
        manifest: The manifest that sends it in full.
        layouts: Layout of each tensor, in the manifest's order.
        file: The payload.
        chunks: The payload in pieces that are sent as they are.
        low_rank: Adapters of the tensors that have some, by name.
    """

    manifest: weights_pb2.WeightManifest
    layouts: dict[str, TensorLayout]
    file: FileMapping
    chunks: list[PayloadChunk]
    low_rank: dict[str, LowRank] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._offsets = [0]
        for chunk in self.chunks:
            self._offsets.append(self._offsets[-1] + chunk.data.nbytes)

    def pieces(self, offset: int, size: int) -> Iterator[Piece]:
        """Yields `size` bytes of the payload from `offset` on."""
        end = offset + size
        at = bisect_right(self._offsets, offset) - 1
        while offset < end:
            start = self._offsets[at]
            piece = Piece(self.chunks[at], offset - start, min(end, self._offsets[at + 1]) - start)
            yield piece
            offset += piece.size
            at += 1

    def shared(self) -> SharedVersion:
        """Returns the file as another process needs it."""
        return SharedVersion(self.manifest, self.file, [spec.payload_offset for spec in self.manifest.tensors])


@dataclass
class _Tensor:
    """A tensor on its way into a snapshot; the methods run in its lane.

    `change` is None, when the last byte was taken, for a tensor that is to be sent in full; `comparable` is False when
    it could not be compared at all. `adapted` says that there is another way to send it, so that a sparse payload for
    which there is no memory does not end the comparison of all tensors.
    """

    lane: Lane
    encoder: SparseEncoder | None
    comparable: bool
    missing: int
    hasher: TensorHasher
    adapted: bool
    change: SparseTensor | None = None
    spent: int = 0  # bytes that `spend` was told of

    def take(self, old: memoryview | None, new: memoryview, spend: Callable[[int], bool]) -> None:
        """Hashes the next bytes and compares them with the old ones; without old ones the comparison ends."""
        self.hasher.update(new)
        self.missing -= new.nbytes
        if self.encoder is None:
            return
        encoder = self.encoder
        if old is None:
            self.comparable, self.encoder, self.change = False, None, None
        elif not self._compare(encoder, old, new, spend):
            if self.adapted:
                spend(-self.spent)
            self.comparable, self.encoder, self.change = self.adapted, None, None

    def _compare(self, encoder: SparseEncoder, old: memoryview, new: memoryview, spend: Callable[[int], bool]) -> bool:
        before = encoder.held_bytes
        encoder.compare(old, new)
        held = encoder.held_bytes
        if not self.missing:
            self.change, self.encoder = encoder.finish(), None
            held = len(self.change.payload) if self.change is not None else 0
        self.spent += held - before
        return held == before or spend(held - before)


class SnapshotBuilder:
    """Makes a snapshot, and the changes against the previous one if it has the same tensors.

    Args:
        version: Version of the new snapshot.
        file: Where it is written.
        previous: The present one, which lies there and is overwritten; None when there is nothing to compare with.
        lanes: Where hashing and comparing run.
        chunk_bytes: Largest size of a chunk, from 16 KiB to 2 MiB. A chunk ends where an element does, and holds either
            bytes of one large tensor or any number of small ones.
        spend: Called from the lanes with the growth of the encoded changes in bytes; False gives up encoding.
        low_rank: The adapters of tensors that have some; those of a tensor are there when it is added. Its sparse
            payload is kept only where it is shorter.
    """

    def __init__(
        self,
        version: weights_pb2.WeightVersion,
        file: GrowingFile,
        previous: Snapshot | None,
        lanes: Lanes,
        chunk_bytes: int,
        spend: Callable[[int], bool],
        low_rank: Mapping[str, LowRank] | None = None,
    ) -> None:
        self._version = version
        self._file = file
        self._previous = previous
        self._old_layouts = list(previous.layouts.items()) if previous is not None else []
        self._old = memoryview(previous.file) if previous is not None else memoryview(b"")
        self._lanes = lanes
        self._chunk_bytes = chunk_bytes
        self._spend = spend
        self._low_rank = low_rank if low_rank is not None else {}
        self._layouts: dict[str, TensorLayout] = {}
        self._tensors: list[_Tensor] = []
        self._ends: list[int] = []  # of the chunks
        self._crc32: list[int] = []
        self._offset = 0
        self._filled = 0
        self._last_bytes = 0
        self._parts: list[memoryview] = []  # of the chunk at hand; the first `_owned` are copies
        self._owned = 0
        self._segments: list[tuple[_Tensor, int, int]] = []

    def add(self, name: str, layout: TensorLayout, pieces: Iterable[memoryview]) -> None:
        """Takes the next tensor.

        Args:
            name: Its name.
            layout: Its element type and extents.
            pieces: Its bytes in order, each piece flat and of whole elements. A piece is not needed after the next one
                was taken.

        Raises:
            ValueError: The name occurred before, or the pieces are not the tensor's size.
        """
        if name in self._layouts:
            raise ValueError(f"tensor {name} occurs twice")
        at = len(self._tensors)
        if self._previous is not None and self._old_layouts[at : at + 1] != [(name, layout)]:
            self._previous = None
        size = layout.byte_size
        if max(size, self._last_bytes) >= INLINE_BYTES:
            self._flush()
        self._last_bytes = size
        word_bytes = ELEMENT_BYTES[layout.dtype]
        adapter = self._low_rank.get(name)
        limit_bytes = min(int(SPARSE_LIMIT * size), len(adapter.payload) if adapter is not None else size)
        encoder = SparseEncoder(word_bytes, limit_bytes) if self._previous is not None else None
        tensor = _Tensor(
            self._lanes.lane(size), encoder, encoder is not None, size, tensor_hasher(), adapter is not None
        )
        self._layouts[name] = layout
        self._tensors.append(tensor)
        taken = 0
        for piece in pieces:
            if piece.nbytes % word_bytes or taken + piece.nbytes > size:
                raise ValueError(f"a piece of {piece.nbytes} bytes after {taken} of {size} bytes of tensor {name}")
            self._take(tensor, piece, word_bytes)
            self._parts[self._owned :] = [memoryview(bytes(part)) for part in self._parts[self._owned :]]
            self._owned = len(self._parts)
            taken += piece.nbytes
        if taken != size:
            raise ValueError(f"tensor {name} has {taken} bytes, its layout has {size}")

    def finish(self) -> tuple[Snapshot, list[SparseTensor | None] | None]:
        """Waits for the lanes; returns the snapshot and the change of each tensor, None where it is sent in full.

        The second part is None when there was nothing to compare with, the tensors differ, or `spend` gave up.
        """
        if len(self._old_layouts) != len(self._tensors):
            self._previous = None
        self._flush()
        self._lanes.join()
        digests = {name: tensor.hasher.digest() for name, tensor in zip(self._layouts, self._tensors, strict=True)}
        file = self._file.mapped(self._offset)
        view = memoryview(file)
        chunks, start = [], 0
        for end, crc32 in zip(self._ends, self._crc32, strict=True):
            chunks.append(PayloadChunk(view[start:end], crc32))
            start = end
        manifest = full_manifest(self._version, self._layouts, digests)
        low_rank = {name: self._low_rank[name] for name in self._layouts if name in self._low_rank}
        for spec in manifest.tensors:
            if spec.name in low_rank:
                spec.low_rank_base_digest = low_rank[spec.name].base_digest
        snapshot = Snapshot(manifest, self._layouts, file, chunks, low_rank)
        comparable = self._previous is not None and all(tensor.comparable for tensor in self._tensors)
        return snapshot, [tensor.change for tensor in self._tensors] if comparable else None

    def _take(self, tensor: _Tensor, piece: memoryview, word_bytes: int) -> None:
        position = 0
        while position < piece.nbytes:
            room = (self._chunk_bytes - self._filled) // word_bytes * word_bytes
            part = piece[position : position + room]
            if part:
                self._parts.append(part)
                self._segments.append((tensor, self._filled, self._filled + part.nbytes))
                self._filled += part.nbytes
                position += part.nbytes
            if part.nbytes == room:
                self._flush()

    def _flush(self) -> None:
        """Turns the collected parts into a chunk and hands it to a lane, which writes it over the old bytes."""
        if not self._parts:
            return
        data = memoryview(b"".join(self._parts))
        old = self._old[self._offset : self._offset + self._filled] if self._previous is not None else None
        # All segments are of tensors in one lane: a large tensor has its chunks for itself, small ones run inline.
        lane = self._segments[0][0].lane
        self._crc32.append(0)
        lane.submit(self._store, len(self._ends), self._offset, self._segments, old, data)
        self._offset += self._filled
        self._ends.append(self._offset)
        self._filled = self._owned = 0
        self._parts = []
        self._segments = []

    def _store(
        self, at: int, offset: int, segments: list[tuple[_Tensor, int, int]], old: memoryview | None, data: memoryview
    ) -> None:
        """Compares and hashes a chunk and writes it; runs in a lane."""
        for tensor, start, end in segments:
            tensor.take(old[start:end] if old is not None else None, data[start:end], self._spend)
        self._crc32[at] = crc32_of([data])
        self._file.write(data, offset)
