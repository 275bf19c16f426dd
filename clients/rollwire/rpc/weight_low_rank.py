"""The low-rank encoding of one tensor: a matrix that is kept plus a product of two thin ones; in numpy, without torch.

The format and the arithmetic are in `weights.proto` under `TENSOR_ENCODING_LOW_RANK`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from rollwire.rpc.digests import weights_digest
from rollwire.rpc.weight_manifest import HostTensor, TensorLayout, factor_bytes
from rollwire.v1 import weights_pb2

_BLOCK_ELEMENTS: Final = 1 << 15
"""Elements merged at a time: block and product, 128 KiB each, stay in a core's cache for all ranks."""

_QUIET_NAN: Final = 0x7FC0  # bfloat16

Matrix: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LowRank:
    """A matrix as W0 + B·A.

    Attributes:
        base_digest: `TensorSpec.digest` of W0.
        rank: Rows of A and columns of B.
        payload: A[rank, N], then B[M, rank], float32 and little-endian; B includes the adapter's scale.
    """

    base_digest: bytes
    rank: int
    payload: bytes | bytearray


class LowRankBases:
    """The W0 that a reader keeps, one serving-dtype copy of every tensor that has one.

    They are learned from a version whose adapters change nothing, where the tensor's digest is that of its W0.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[bytes, bytes]] = {}  # digest and content, by name

    @property
    def digest(self) -> bytes:
        """`FetchWeightsRequest.low_rank_bases`; empty when nothing is kept."""
        return bases_digest((name, digest) for name, (digest, _) in self._kept.items())

    def find(self, name: str, digest: bytes) -> bytes | None:
        """Returns the bytes of a tensor's W0 if the one kept has this digest."""
        kept, data = self._kept.get(name, (b"", b""))
        return data if kept == digest else None

    def learn(self, specs: Iterable[weights_pb2.TensorSpec], tensors: Mapping[str, HostTensor]) -> None:
        """Takes what a verified version shows of its W0, and forgets the W0 that it does not build on."""
        after = {}
        for spec in specs:
            wanted = spec.low_rank_base_digest
            known = self.find(spec.name, wanted) if wanted else None
            if known is None and wanted and wanted == spec.digest:
                known = bytes(tensors[spec.name].data)
            if known is not None:
                after[spec.name] = (wanted, known)
        self._kept = after


def bases_digest(bases: Iterable[tuple[str, bytes]]) -> bytes:
    """Returns the digest of a set of W0, given names and digests; empty for none."""
    found = list(bases)
    return weights_digest(found) if found else b""


def declared_bases(manifest: weights_pb2.WeightManifest) -> bytes:
    """Returns what `FetchWeightsRequest.low_rank_bases` must be for a reader to get a version's adapters."""
    return bases_digest(
        (spec.name, spec.low_rank_base_digest) for spec in manifest.tensors if spec.low_rank_base_digest
    )


def merge_low_rank(target: memoryview, base: memoryview | bytes, layout: TensorLayout, change: LowRank) -> None:
    """Writes W0 + B·A, rounded to the tensor's type. The bits are those of `learner.lora.merged_rows`.

    Every element is computed in float32 from single multiplications and additions in ascending order of the rank, so
    IEEE 754 says what comes out.

    Args:
        target: Bytes of the tensor, writable.
        base: Bytes of W0.
        layout: M rows and N columns of a floating-point type.
        change: A and B; `check_manifest` has checked the payload's size.
    """
    rows, columns = layout.shape
    assert len(change.payload) == factor_bytes(layout, change.rank)
    down = np.frombuffer(change.payload, "<f4", change.rank * columns).reshape(change.rank, columns)
    up = np.frombuffer(change.payload, "<f4", offset=down.nbytes).reshape(rows, change.rank)
    word = "<u4" if layout.dtype == weights_pb2.DATA_TYPE_FLOAT32 else "<u2"
    old, new = (np.frombuffer(data, word).reshape(rows, columns) for data in (base, target))
    step = max(1, _BLOCK_ELEMENTS // columns)
    with np.errstate(all="ignore"):
        for first in range(0, rows, step):
            here = slice(first, first + step)
            block = _widened(old[here], layout.dtype)
            product = np.empty_like(block)
            for index in range(change.rank):
                np.multiply(up[here, index : index + 1], down[index], out=product)
                block += product
            new[here] = _rounded(block, layout.dtype)


def _widened(words: npt.NDArray[Any], dtype: weights_pb2.DataType.ValueType) -> Matrix:
    """Returns elements as float32; a copy."""
    if dtype == weights_pb2.DATA_TYPE_BFLOAT16:
        return (words.astype("<u4") << np.uint32(16)).view("<f4")
    kind = "<f2" if dtype == weights_pb2.DATA_TYPE_FLOAT16 else "<f4"
    return words.view(kind).astype("<f4")


def _rounded(block: Matrix, dtype: weights_pb2.DataType.ValueType) -> npt.NDArray[Any]:
    """Returns the words of float32 elements in another type, rounded to nearest, ties to even."""
    if dtype == weights_pb2.DATA_TYPE_FLOAT16:
        return block.astype("<f2").view("<u2")
    words = block.view("<u4")
    if dtype == weights_pb2.DATA_TYPE_FLOAT32:
        return words
    odd = (words >> np.uint32(16)) & np.uint32(1)
    halves = ((words + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype("<u2")
    halves[np.isnan(block)] = _QUIET_NAN
    return halves
