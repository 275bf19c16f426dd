"""The sparse encoding of one tensor against an earlier one: exact on bits, in numpy, without torch.

The format is in `weights.proto` under `TENSOR_ENCODING_SPARSE`. The encoder takes old and new bytes piece by piece and
compresses as it goes, so that neither tensor needs to lie in one buffer and little beside the result is held; the
decoder believes no count before it has checked it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from rollwire.rpc.weight_manifest import BLOCK_HEAD_BYTES, corrupt
from rollwire.v1 import weights_pb2

try:
    import zstandard
except ImportError:  # an optional dependency: without it the encoding is neither offered nor accepted
    zstandard = None  # type: ignore[assignment]

MAX_BLOCK_GAPS: Final = 1 << 20
"""Most gap bytes of a block; decoding needs about 24 bytes of temporary memory for each."""

GAP_LIMIT: Final = 255
"""A gap byte of this value skips as many elements and selects none."""

_HEAD: Final = struct.Struct("<II")
_WORDS: Final[dict[int, npt.DTypeLike]] = {2: "<u2", 4: "<u4", 8: "<u8"}
_ZSTD_LEVEL: Final = 1
_ZSTD_WINDOW_BYTES: Final = 8 << 20

Indices: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[Any]
"""Element words as unsigned integers of 2, 4 or 8 bytes."""


def supported_encodings() -> tuple[weights_pb2.TensorEncoding.ValueType, ...]:
    """Returns what this process can decode, for `FetchWeightsRequest.accepted_encodings`."""
    plain = (
        weights_pb2.TENSOR_ENCODING_FULL,
        weights_pb2.TENSOR_ENCODING_UNCHANGED,
        weights_pb2.TENSOR_ENCODING_SPARSE,
        weights_pb2.TENSOR_ENCODING_LOW_RANK,
    )
    return plain if zstandard is None else (*plain, weights_pb2.TENSOR_ENCODING_SPARSE_ZSTD)


@dataclass(frozen=True)
class SparseTensor:
    """What changed in one tensor.

    Attributes:
        encoding: UNCHANGED, SPARSE or SPARSE_ZSTD.
        changed: Number of elements that the payload changes.
        sparse_bytes: Length of the payload before compression.
        payload: The payload as it travels.
    """

    encoding: weights_pb2.TensorEncoding.ValueType
    changed: int
    sparse_bytes: int
    payload: bytes | bytearray

    def plain(self) -> SparseTensor:
        """Returns the same change without compression."""
        if self.encoding != weights_pb2.TENSOR_ENCODING_SPARSE_ZSTD:
            return self
        payload = _decompressed(self.payload, self.sparse_bytes)
        return SparseTensor(weights_pb2.TENSOR_ENCODING_SPARSE, self.changed, self.sparse_bytes, payload)


UNCHANGED: Final = SparseTensor(weights_pb2.TENSOR_ENCODING_UNCHANGED, 0, 0, b"")


class SparseEncoder:
    """Encodes one tensor; gives up as soon as the payload exceeds a limit.

    Args:
        word_bytes: Size of an element: 2, 4 or 8.
        limit_bytes: Longest payload before compression that is worth having.
    """

    def __init__(self, word_bytes: int, limit_bytes: int) -> None:
        self._word_bytes = word_bytes
        self._limit_bytes = limit_bytes
        self._packer: Any = None  # made when something changed: it holds about a megabyte
        self._out: list[bytes] = []
        self._skipped = 0  # elements since the last changed one
        self._changed = 0
        self._sparse_bytes = 0
        self._gave_up = False
        self.held_bytes = 0
        """Size of the result so far."""

    def compare(self, old: memoryview, new: memoryview) -> None:
        """Takes the next elements: their bytes before and after, equally long and at most 1 Mi elements."""
        if self._gave_up:
            return
        dtype = _WORDS[self._word_bytes]
        before, after = np.frombuffer(old, dtype), np.frombuffer(new, dtype)
        index = np.flatnonzero(before != after)
        self.put(index, after[index] - before[index], len(after))

    def put(self, index: Indices, difference: Words, elements: int) -> None:
        """Takes the next elements: which of them changed, and by what.

        Args:
            index: Ascending positions within these elements; at most 1 Mi.
            difference: New minus old word of each, modulo the word's range.
            elements: How many elements are taken.
        """
        if self._gave_up:
            return
        if not index.size:
            self._skipped += elements
            return
        skips = np.empty(len(index), np.int64)
        skips[0] = index[0] + self._skipped
        np.subtract(index[1:], index[:-1], out=skips[1:])
        skips[1:] -= 1
        self._skipped = elements - 1 - int(index[-1])
        self._changed += len(index)
        gaps = _gap_bytes(skips)
        planes = _zigzag(difference).view(np.uint8).reshape(-1, self._word_bytes).T
        done = 0
        for start in range(0, len(gaps), MAX_BLOCK_GAPS):  # one block, unless much was skipped before
            part = gaps[start : start + MAX_BLOCK_GAPS]
            count = int(np.count_nonzero(part != GAP_LIMIT))
            self._write(_HEAD.pack(count, len(part)) + part.tobytes() + planes[:, done : done + count].tobytes())
            done += count
        if self._sparse_bytes > self._limit_bytes:
            self._gave_up = True
            self._out.clear()
            self.held_bytes = 0

    def finish(self) -> SparseTensor | None:
        """Returns the encoded change; None when it is longer than the limit."""
        if self._gave_up:
            return None
        if not self._changed:
            return UNCHANGED
        if self._packer is not None:
            self._out.append(self._packer.flush())
        payload = b"".join(self._out)
        if self._packer is None:
            return SparseTensor(weights_pb2.TENSOR_ENCODING_SPARSE, self._changed, self._sparse_bytes, payload)
        packed = SparseTensor(weights_pb2.TENSOR_ENCODING_SPARSE_ZSTD, self._changed, self._sparse_bytes, payload)
        return packed if len(payload) < self._sparse_bytes else packed.plain()

    def _write(self, block: bytes) -> None:
        self._sparse_bytes += len(block)
        if self._packer is None and zstandard is not None:
            self._packer = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compressobj()
        out = self._packer.compress(block) if self._packer is not None else block
        self._out.append(out)
        self.held_bytes += len(out)


def apply_sparse(target: memoryview, word_bytes: int, change: SparseTensor) -> None:
    """Changes a tensor in place.

    Args:
        target: Bytes of the base's tensor, writable. Undefined after an error.
        word_bytes: Size of an element: 2, 4 or 8.
        change: What changed; `check_manifest` has bounded its sizes.

    Raises:
        RollwireError: DATA_LOSS / `WEIGHTS_CORRUPT`: the payload is not what the encoding says.
    """
    words = np.frombuffer(target, _WORDS[word_bytes])
    for index, difference in sparse_blocks(change, word_bytes, len(words)):
        words[index] += difference


def sparse_blocks(change: SparseTensor, word_bytes: int, elements: int) -> Iterator[tuple[Indices, Words]]:
    """Yields positions and differences of the changed elements, in ascending order, block by block.

    Raises:
        RollwireError: As `apply_sparse`; possibly after some blocks.
    """
    payload = change.plain().payload
    if len(payload) != change.sparse_bytes:
        raise corrupt(f"a sparse payload has {len(payload)} bytes, expected were {change.sparse_bytes}")
    at, last, total = 0, -1, 0
    while at < len(payload):
        if at + BLOCK_HEAD_BYTES > len(payload):
            raise corrupt("a sparse payload ends inside a block")
        count, gap_bytes = _HEAD.unpack_from(payload, at)
        at += BLOCK_HEAD_BYTES
        end = at + gap_bytes + word_bytes * count
        if not 1 <= gap_bytes <= MAX_BLOCK_GAPS or end > len(payload):
            raise corrupt(f"a block of a sparse payload announces {count} elements in {gap_bytes} gap bytes")
        gaps = np.frombuffer(payload, np.uint8, gap_bytes, at)
        selects = gaps != GAP_LIMIT
        steps = gaps.astype(np.int64)
        steps += selects
        positions = np.cumsum(steps)
        positions += last
        last = int(positions[-1])
        index = positions[selects]
        if len(index) != count or last >= elements:
            raise corrupt(
                f"a block of a sparse payload selects {len(index)} elements up to {last}, announced were {count}; "
                f"the tensor has {elements}"
            )
        planes = np.frombuffer(payload, np.uint8, word_bytes * count, at + gap_bytes).reshape(word_bytes, count)
        total += count
        at = end
        if count:
            yield index, _unzigzag(np.ascontiguousarray(planes.T).view(_WORDS[word_bytes]).reshape(-1))
    if total != change.changed:
        raise corrupt(f"a sparse payload changes {total} elements, announced were {change.changed}")


def compose(changes: Sequence[SparseTensor], word_bytes: int, elements: int, limit_bytes: int) -> SparseTensor | None:
    """Returns the change that several changes make one after the other; None when it is longer than the limit.

    Differences add up modulo the word's range, so the result is what comparing the outermost versions would have given.
    """
    encoder = SparseEncoder(word_bytes, limit_bytes)
    start = 0
    for end, index, difference in _merged([sparse_blocks(change, word_bytes, elements) for change in changes]):
        encoder.put(index - start, difference, end - start)
        start = end
    return encoder.finish()


def _merged(parts: list[Iterator[tuple[Indices, Words]]]) -> Iterator[tuple[int, Indices, Words]]:
    """Yields window end, positions and summed differences of several changes; a window ends where a block does."""
    heads = [(part, head) for part in parts if (head := next(part, None)) is not None]
    while heads:
        end = min(int(index[-1]) for _, (index, _) in heads) + 1
        taken, rest = [], []
        for part, (index, difference) in heads:
            cut = int(np.searchsorted(index, end))
            taken.append((index[:cut], difference[:cut]))
            head = (index[cut:], difference[cut:]) if cut < len(index) else next(part, None)
            if head is not None:
                rest.append((part, head))
        heads = rest
        index = np.concatenate([index for index, _ in taken])
        order = np.argsort(index, kind="stable")  # linear: it merges the sorted runs
        index, difference = index[order], np.concatenate([difference for _, difference in taken])[order]
        first = np.flatnonzero(np.diff(index, prepend=-1))
        total = np.add.reduceat(difference, first, dtype=difference.dtype)
        changed = total != 0
        yield end, index[first][changed], total[changed]


def _gap_bytes(skips: Indices) -> npt.NDArray[np.uint8]:
    """Returns the gap bytes of numbers of skipped elements."""
    wide, rest = np.divmod(skips, GAP_LIMIT)
    if not wide.any():
        return rest.astype(np.uint8)
    ends = np.cumsum(wide + 1)
    gaps = np.full(int(ends[-1]), GAP_LIMIT, np.uint8)
    gaps[ends - 1] = rest
    return gaps


def _zigzag(difference: Words) -> Words:
    """Returns small unsigned numbers for differences that are small in either direction."""
    signed = difference.view(np.dtype(difference.dtype.str.replace("u", "i")))
    folded: Words = (signed << 1) ^ (signed >> (8 * difference.itemsize - 1))
    return folded.view(difference.dtype)


def _unzigzag(values: Words) -> Words:
    one = values.dtype.type(1)
    difference: Words = (values >> one) ^ (~(values & one) + one)
    return difference


def _decompressed(payload: bytes | bytearray, size: int) -> bytes:
    """Returns the content of a frame of exactly `size` bytes; allocates no more than that, whatever the frame says."""
    if zstandard is None:
        raise corrupt("a tensor is compressed with Zstandard, which this process did not offer to accept")
    try:
        frame = zstandard.get_frame_parameters(payload)
        if frame.content_size not in (size, zstandard.CONTENTSIZE_UNKNOWN):
            raise corrupt(f"a compressed payload announces {frame.content_size} bytes, expected were {size}")
        decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        return decompressor.decompress(payload, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise corrupt(f"a compressed payload is damaged: {error}") from error
