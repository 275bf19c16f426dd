"""Tensors in host memory and the manifest that describes them. Pure functions; no sockets, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from rollwire.rpc.digests import tensor_digest, weights_digest
from rollwire.rpc.errors import Reason, RollwireError, precondition
from rollwire.rpc.versions import version_text
from rollwire.v1 import weights_pb2

ELEMENT_BYTES: Final = {
    weights_pb2.DATA_TYPE_FLOAT32: 4,
    weights_pb2.DATA_TYPE_FLOAT16: 2,
    weights_pb2.DATA_TYPE_BFLOAT16: 2,
    weights_pb2.DATA_TYPE_INT64: 8,
}
MAX_TENSORS: Final = 100_000
MAX_NAME_LENGTH: Final = 512
BLOCK_HEAD_BYTES: Final = 8
"""Length of the two counts at the beginning of a block of a sparse payload."""

_FULL: Final = weights_pb2.TENSOR_ENCODING_FULL
_UNCHANGED: Final = weights_pb2.TENSOR_ENCODING_UNCHANGED
_LOW_RANK: Final = weights_pb2.TENSOR_ENCODING_LOW_RANK
_DIGEST_BYTES: Final = 32
SPARSE_ENCODINGS: Final = (weights_pb2.TENSOR_ENCODING_SPARSE, weights_pb2.TENSOR_ENCODING_SPARSE_ZSTD)


@dataclass(frozen=True)
class HostTensor:
    """A tensor in host memory.

    Attributes:
        dtype: Element type.
        shape: Extents, outermost first.
        data: Row-major little-endian bytes, contiguous.
    """

    dtype: weights_pb2.DataType.ValueType
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True)
class TensorLayout:
    """What a receiver expects of one tensor: element type and extents."""

    dtype: weights_pb2.DataType.ValueType
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def byte_size(self) -> int:
        """Size of the tensor in bytes."""
        return self.elements * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class Base:
    """Identity of a version that the reader holds completely.

    Attributes:
        version: The version.
        digest: `WeightManifest.digest` of it.
        tensor_digests: `TensorSpec.digest` of each of its tensors, by name.
    """

    version: weights_pb2.WeightVersion
    digest: bytes
    tensor_digests: Mapping[str, bytes]


def factor_bytes(layout: TensorLayout, rank: int) -> int:
    """Returns the size of two float32 factors whose product is a matrix of this layout."""
    rows, columns = layout.shape
    return 4 * rank * (rows + columns)


def corrupt(message: str) -> RollwireError:
    """Returns the error of a stream that must be discarded."""
    return RollwireError(grpc.StatusCode.DATA_LOSS, Reason.WEIGHTS_CORRUPT, message)


def build_manifest(version: weights_pb2.WeightVersion, tensors: Mapping[str, HostTensor]) -> weights_pb2.WeightManifest:
    """Describes a full set of weights; payloads lie in the order of `tensors`."""
    layouts = {name: TensorLayout(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    digests = {name: tensor_digest(tensor.data) for name, tensor in tensors.items()}
    return full_manifest(version, layouts, digests)


def full_manifest(
    version: weights_pb2.WeightVersion, layouts: Mapping[str, TensorLayout], digests: Mapping[str, bytes]
) -> weights_pb2.WeightManifest:
    """Describes a full set of weights whose digests are known; payloads lie in the order of `layouts`."""
    manifest = weights_pb2.WeightManifest(version=version)
    offset = 0
    for name, layout in layouts.items():
        size = layout.byte_size
        manifest.tensors.add(
            name=name,
            dtype=layout.dtype,
            shape=layout.shape,
            byte_size=size,
            digest=digests[name],
            encoding=_FULL,
            payload_offset=offset,
            payload_bytes=size,
        )
        offset += size
    manifest.payload_bytes = offset
    manifest.digest = weights_digest(digests.items())
    return manifest


def check_manifest(
    manifest: weights_pb2.WeightManifest, expected: Mapping[str, TensorLayout], base: Base | None = None
) -> None:
    """Checks that a manifest is consistent, describes exactly the model's tensors and is relative to what is held.

    Args:
        manifest: The manifest.
        expected: Layout of every tensor of the model, by name.
        base: What the reader holds and said that it has.

    Raises:
        RollwireError: `WEIGHTS_CORRUPT` for an inconsistent manifest or one relative to other weights,
            `WEIGHTS_MISMATCH` for another model's.
    """
    _check_names(manifest, expected)
    held = _check_base(manifest, base)
    offset = 0
    for spec in manifest.tensors:
        _check_spec(spec, expected[spec.name], held)
        if spec.payload_offset != offset:
            raise corrupt(f"tensor {spec.name} starts at byte {spec.payload_offset}, expected was byte {offset}")
        offset += spec.payload_bytes
    if manifest.payload_bytes != offset:
        raise corrupt(f"the manifest announces {manifest.payload_bytes} bytes, its tensors have {offset}")
    if manifest.digest != weights_digest((spec.name, spec.digest) for spec in manifest.tensors):
        raise corrupt("the manifest's digest does not match its tensors")


def _check_names(manifest: weights_pb2.WeightManifest, expected: Mapping[str, TensorLayout]) -> None:
    if len(manifest.tensors) > MAX_TENSORS:
        raise corrupt(f"the manifest lists {len(manifest.tensors)} tensors; allowed: {MAX_TENSORS}")
    names = {spec.name for spec in manifest.tensors}
    if len(names) != len(manifest.tensors):
        raise corrupt("the manifest lists a tensor twice")
    missing, extra = sorted(set(expected) - names), sorted(names - set(expected))
    if missing or extra:
        raise precondition(
            Reason.WEIGHTS_MISMATCH,
            f"the weights are not this model's: missing {missing[:3]} ({len(missing)} in all), "
            f"unknown {extra[:3]} ({len(extra)} in all)",
        )


def _check_base(manifest: weights_pb2.WeightManifest, base: Base | None) -> Mapping[str, bytes] | None:
    """Returns the digests of the base's tensors; None for a manifest that is relative to nothing."""
    if not manifest.HasField("base"):
        if manifest.base_digest:
            raise corrupt("the manifest has the digest of a base but no base")
        return None
    if base is None or manifest.base != base.version or manifest.base_digest != base.digest:
        held = version_text(base.version) if base is not None else "none"
        raise corrupt(
            f"the manifest is relative to {version_text(manifest.base)} with digest "
            f"{manifest.base_digest.hex()[:16] or 'none'}, held is {held} with digest "
            f"{base.digest.hex()[:16] if base is not None else 'none'}; fetch the whole version"
        )
    return base.tensor_digests


def _check_spec(spec: weights_pb2.TensorSpec, layout: TensorLayout, held: Mapping[str, bytes] | None) -> None:
    if spec.dtype != layout.dtype or tuple(spec.shape) != layout.shape:
        raise precondition(
            Reason.WEIGHTS_MISMATCH,
            f"tensor {spec.name} has {_layout_text(spec.dtype, spec.shape)}, "
            f"the model has {_layout_text(layout.dtype, layout.shape)}",
        )
    size = layout.byte_size
    if spec.encoding == _FULL:
        sound = spec.payload_bytes == size and not spec.changed_elements and not spec.sparse_bytes
    elif held is None:
        sound = False
    elif spec.encoding == _UNCHANGED:
        sound = not (spec.payload_bytes or spec.changed_elements or spec.sparse_bytes)
        sound = sound and held.get(spec.name) == spec.digest
    elif spec.encoding == _LOW_RANK:
        sound = _is_low_rank_sound(spec, layout)
    else:
        sound = _is_sparse_sound(spec, layout)
    sound = sound and (spec.encoding == _LOW_RANK or not spec.low_rank)
    if not sound or spec.byte_size != size or len(spec.low_rank_base_digest) not in (0, _DIGEST_BYTES):
        raise corrupt(
            f"tensor {spec.name} announces {spec.payload_bytes} of {size} bytes, {spec.changed_elements} changed "
            f"elements, {spec.sparse_bytes} sparse bytes and rank {spec.low_rank} in encoding {spec.encoding}, "
            "which do not fit together"
        )


def _is_sparse_sound(spec: weights_pb2.TensorSpec, layout: TensorLayout) -> bool:
    """Tells whether the sizes of a sparse tensor are possible; they bound what decoding may allocate."""
    if spec.encoding not in SPARSE_ENCODINGS or not 1 <= spec.changed_elements <= layout.elements:
        return False
    least = BLOCK_HEAD_BYTES + spec.changed_elements * (1 + ELEMENT_BYTES[layout.dtype])
    if not least <= spec.sparse_bytes <= 2 * layout.byte_size:
        return False
    plain = spec.encoding == weights_pb2.TENSOR_ENCODING_SPARSE
    fits = spec.payload_bytes == spec.sparse_bytes if plain else 0 < spec.payload_bytes < spec.sparse_bytes
    return fits and spec.payload_bytes < layout.byte_size


def _is_low_rank_sound(spec: weights_pb2.TensorSpec, layout: TensorLayout) -> bool:
    """Tells whether a tensor can have such factors; the check bounds what merging may allocate."""
    if len(layout.shape) != 2 or layout.dtype == weights_pb2.DATA_TYPE_INT64 or not spec.low_rank:
        return False
    fits = spec.payload_bytes == factor_bytes(layout, spec.low_rank) < layout.byte_size
    return fits and bool(spec.low_rank_base_digest) and not (spec.changed_elements or spec.sparse_bytes)


def _layout_text(dtype: weights_pb2.DataType.ValueType, shape: Sequence[int]) -> str:
    known = weights_pb2.DataType.DESCRIPTOR.values_by_number.get(dtype)
    name = known.name.removeprefix("DATA_TYPE_").lower() if known is not None else f"type {dtype} "
    return f"{name}{list(shape)}"
