"""One published version in host memory, as chunks that are ready to be sent, and how it is made from the last one.

Making the next version consumes the present one chunk by chunk: each new chunk is compared with the old one at the same
place, which is then dropped. So there is never more than one whole version in memory, and no copy for each reader.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rollwire.rpc.digests import TensorHasher, tensor_hasher
from rollwire.rpc.weight_delta import SparseEncoder, SparseTensor
from rollwire.rpc.weight_lanes import Lane, Lanes
from rollwire.rpc.weight_manifest import ELEMENT_BYTES, TensorLayout, full_manifest
from rollwire.rpc.weight_steps import SPARSE_LIMIT
from rollwire.rpc.weight_wire import WireChunk, write_chunk
from rollwire.v1 import weights_pb2


@dataclass
class Snapshot:
    """A version as chunks.

    Attributes:
        manifest: The manifest that sends it in full.
        layouts: Layout of each tensor, in the manifest's order.
        chunks: The payload; None where the making of the next version has dropped it.
    """

    manifest: weights_pb2.WeightManifest
    layouts: dict[str, TensorLayout]
    chunks: list[WireChunk | None]

    def __post_init__(self) -> None:
        self._offsets = [chunk.offset for chunk in self.chunks if chunk is not None]

    def pieces(self, offset: int, size: int) -> Iterator[memoryview]:
        """Yields `size` bytes of the payload from `offset` on, as views of the chunks."""
        end = offset + size
        at = bisect_right(self._offsets, offset) - 1
        while offset < end:
            chunk = self.chunks[at]
            assert chunk is not None
            piece = chunk.data[offset - chunk.offset : end - chunk.offset]
            yield piece
            offset += piece.nbytes
            at += 1


@dataclass
class _Tensor:
    """A tensor on its way into a snapshot; the methods run in its lane.

    `change` is None, when the last byte was taken, for a tensor that is to be sent in full; `comparable` is False when
    it could not be compared at all.
    """

    lane: Lane
    encoder: SparseEncoder | None
    comparable: bool
    missing: int
    hasher: TensorHasher
    change: SparseTensor | None = None

    def take(self, old: memoryview | None, new: memoryview, spend: Callable[[int], bool]) -> None:
        """Hashes the next bytes and compares them with the old ones; without old ones the comparison ends."""
        self.hasher.update(new)
        self.missing -= new.nbytes
        if self.encoder is not None and (old is None or not self._compare(self.encoder, old, new, spend)):
            self.comparable, self.encoder, self.change = False, None, None

    def _compare(self, encoder: SparseEncoder, old: memoryview, new: memoryview, spend: Callable[[int], bool]) -> bool:
        before = encoder.held_bytes
        encoder.compare(old, new)
        held = encoder.held_bytes
        if not self.missing:
            self.change, self.encoder = encoder.finish(), None
            held = len(self.change.payload) if self.change is not None else 0
        return spend(held - before)


class SnapshotBuilder:
    """Makes a snapshot, and the changes against the previous one if it has the same tensors.

    Args:
        version: Version of the new snapshot.
        previous: The present one, whose chunks are dropped on the way; None when there is nothing to compare with.
        lanes: Where hashing and comparing run.
        chunk_bytes: Size of a chunk, from 16 KiB to 2 MiB; a chunk ends where an element does.
        spend: Called from the lanes with the growth of the encoded changes in bytes; False gives up encoding.
    """

    def __init__(
        self,
        version: weights_pb2.WeightVersion,
        previous: Snapshot | None,
        lanes: Lanes,
        chunk_bytes: int,
        spend: Callable[[int], bool],
    ) -> None:
        self._version = version
        self._previous = previous
        self._old_layouts = list(previous.layouts.items()) if previous is not None else []
        self._lanes = lanes
        self._chunk_bytes = chunk_bytes
        self._spend = spend
        self._layouts: dict[str, TensorLayout] = {}
        self._tensors: list[_Tensor] = []
        self._chunks: list[WireChunk | None] = []
        self._offset = 0
        self._filled = 0
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
        word_bytes = ELEMENT_BYTES[layout.dtype]
        encoder = SparseEncoder(word_bytes, int(SPARSE_LIMIT * size)) if self._previous is not None else None
        tensor = _Tensor(self._lanes.lane(size), encoder, encoder is not None, size, tensor_hasher())
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
        snapshot = Snapshot(full_manifest(self._version, self._layouts, digests), self._layouts, self._chunks)
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
        """Turns the collected parts into a chunk and hands it to the lanes beside the old one, which is dropped."""
        if not self._parts:
            return
        chunk = write_chunk(self._offset, self._parts)
        old = None
        if self._previous is not None:
            at = len(self._chunks)
            old, self._previous.chunks[at] = self._previous.chunks[at], None
        for tensor, start, end in self._segments:
            before = old.data[start:end] if old is not None else None
            tensor.lane.submit(tensor.take, before, chunk.data[start:end], self._spend)
        self._chunks.append(chunk)
        self._offset += self._filled
        self._filled = self._owned = 0
        self._parts = []
        self._segments = []
