"""The weight stream as pure functions and one state machine: manifest → chunks → commit. No sockets, no torch.

The sender describes its tensors in a manifest and cuts their bytes into chunks. The receiver, `WeightAssembler`,
accepts the messages in order and refuses anything that is out of order, damaged, short or not what the manifest says;
until the commit is accepted nothing may be used.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from rollwire.rpc.digests import weights_digest
from rollwire.rpc.errors import Reason, RollwireError, precondition
from rollwire.rpc.limits import CHUNK_BYTES, MAX_CHUNK_BYTES
from rollwire.v1 import learner_pb2, weights_pb2

ELEMENT_BYTES: Final = {
    weights_pb2.DATA_TYPE_FLOAT32: 4,
    weights_pb2.DATA_TYPE_FLOAT16: 2,
    weights_pb2.DATA_TYPE_BFLOAT16: 2,
    weights_pb2.DATA_TYPE_INT64: 8,
}
MAX_TENSORS: Final = 100_000
MAX_NAME_LENGTH: Final = 512


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


def build_manifest(version: weights_pb2.WeightVersion, tensors: Mapping[str, HostTensor]) -> weights_pb2.WeightManifest:
    """Describes a full set of weights; payloads lie in the order of `tensors`."""
    manifest = weights_pb2.WeightManifest(version=version)
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.data.nbytes
        manifest.tensors.add(
            name=name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            byte_size=size,
            sha256=hashlib.sha256(tensor.data).digest(),
            encoding=weights_pb2.TENSOR_ENCODING_FULL,
            payload_offset=offset,
            payload_bytes=size,
        )
        offset += size
    manifest.payload_bytes = offset
    manifest.digest = weights_digest((spec.name, spec.sha256) for spec in manifest.tensors)
    return manifest


def stream_messages(
    manifest: weights_pb2.WeightManifest, payloads: Sequence[memoryview], chunk_bytes: int = CHUNK_BYTES
) -> Iterator[learner_pb2.FetchWeightsResponse]:
    """Yields the messages of one stream.

    Args:
        manifest: Table of contents.
        payloads: Payload of each tensor, in the manifest's order, as flat bytes.
        chunk_bytes: Largest payload of a chunk. Chunks run across tensors, so that many small tensors share one.
    """
    yield learner_pb2.FetchWeightsResponse(manifest=manifest)
    buffer = bytearray()
    offset = 0
    for payload in payloads:
        position = 0
        while position < len(payload):
            taken = payload[position : position + chunk_bytes - len(buffer)]
            buffer += taken
            position += len(taken)
            if len(buffer) == chunk_bytes:
                yield _chunk(offset, bytes(buffer))
                offset += len(buffer)
                buffer.clear()
    if buffer:
        yield _chunk(offset, bytes(buffer))
    commit = weights_pb2.WeightCommit(digest=manifest.digest, payload_bytes=manifest.payload_bytes)
    yield learner_pb2.FetchWeightsResponse(commit=commit)


def _chunk(offset: int, data: bytes) -> learner_pb2.FetchWeightsResponse:
    chunk = weights_pb2.WeightChunk(offset=offset, crc32=zlib.crc32(data), data=data)
    return learner_pb2.FetchWeightsResponse(chunk=chunk)


class WeightAssembler:
    """Receives one stream into host memory beside the live weights.

    Args:
        expected: Layout of every tensor of the model, by name; a manifest must have exactly these.
        version: Version asked for.
    """

    def __init__(self, expected: Mapping[str, TensorLayout], version: weights_pb2.WeightVersion) -> None:
        self._expected = expected
        self._version = version
        self._manifest: weights_pb2.WeightManifest | None = None
        self._buffer = bytearray()
        self._received = 0
        self._committed = False

    @property
    def received_bytes(self) -> int:
        """Payload bytes accepted so far."""
        return self._received

    def feed(self, message: learner_pb2.FetchWeightsResponse) -> None:
        """Accepts the next message.

        Raises:
            RollwireError: DATA_LOSS / `WEIGHTS_CORRUPT` or FAILED_PRECONDITION / `WEIGHTS_MISMATCH`; the assembler is
                useless from then on.
        """
        part = message.WhichOneof("part")
        if self._committed:
            raise _corrupt("a message follows the commit")
        if part == "manifest":
            self._begin(message.manifest)
        elif part == "chunk":
            self._append(message.chunk)
        elif part == "commit":
            self._finish(message.commit)
        else:
            raise _corrupt("a message holds neither manifest nor chunk nor commit")

    def tensors(self) -> dict[str, HostTensor]:
        """Returns the verified tensors; their memory belongs to the assembler's buffer.

        Raises:
            RollwireError: DATA_LOSS / `WEIGHTS_CORRUPT` when the stream ended before its commit.
        """
        if self._manifest is None or not self._committed:
            raise _corrupt(f"the stream ended after {self._received} bytes, before its commit")
        view = memoryview(self._buffer)
        return {
            spec.name: HostTensor(
                spec.dtype, tuple(spec.shape), view[spec.payload_offset : spec.payload_offset + spec.payload_bytes]
            )
            for spec in self._manifest.tensors
        }

    @property
    def digest(self) -> bytes:
        """Digest of the version, as the manifest gives it; empty before the manifest."""
        return self._manifest.digest if self._manifest is not None else b""

    def _begin(self, manifest: weights_pb2.WeightManifest) -> None:
        if self._manifest is not None:
            raise _corrupt("a second manifest arrived")
        if manifest.version != self._version:
            raise _corrupt(
                f"the manifest is of version {manifest.version.lineage}@{manifest.version.step}, "
                f"asked for was {self._version.lineage}@{self._version.step}"
            )
        check_manifest(manifest, self._expected)
        self._manifest = manifest
        self._buffer = bytearray(manifest.payload_bytes)

    def _append(self, chunk: weights_pb2.WeightChunk) -> None:
        if self._manifest is None:
            raise _corrupt("a chunk arrived before the manifest")
        size = len(chunk.data)
        if chunk.offset != self._received:
            raise _corrupt(f"a chunk starts at byte {chunk.offset}, expected was byte {self._received}")
        if not 0 < size <= MAX_CHUNK_BYTES or self._received + size > self._manifest.payload_bytes:
            raise _corrupt(
                f"a chunk of {size} bytes at byte {chunk.offset}; allowed: 1 to {MAX_CHUNK_BYTES} bytes, "
                f"{self._manifest.payload_bytes} in all"
            )
        if zlib.crc32(chunk.data) != chunk.crc32:
            raise _corrupt(f"the checksum of the chunk at byte {chunk.offset} differs")
        self._buffer[self._received : self._received + size] = chunk.data
        self._received += size

    def _finish(self, commit: weights_pb2.WeightCommit) -> None:
        manifest = self._manifest
        if manifest is None:
            raise _corrupt("the commit arrived before the manifest")
        if self._received != manifest.payload_bytes or commit.payload_bytes != manifest.payload_bytes:
            raise _corrupt(f"{self._received} bytes arrived, the manifest announced {manifest.payload_bytes}")
        if commit.digest != manifest.digest:
            raise _corrupt("the digest of the commit differs from the manifest's")
        view = memoryview(self._buffer)
        for spec in manifest.tensors:
            payload = view[spec.payload_offset : spec.payload_offset + spec.payload_bytes]
            if hashlib.sha256(payload).digest() != spec.sha256:
                raise _corrupt(f"the digest of tensor {spec.name} differs")
        self._committed = True


def check_manifest(manifest: weights_pb2.WeightManifest, expected: Mapping[str, TensorLayout]) -> None:
    """Checks that a manifest is consistent and describes exactly the model's tensors.

    Raises:
        RollwireError: `WEIGHTS_CORRUPT` for an inconsistent manifest, `WEIGHTS_MISMATCH` for another model's.
    """
    if len(manifest.tensors) > MAX_TENSORS:
        raise _corrupt(f"the manifest lists {len(manifest.tensors)} tensors; allowed: {MAX_TENSORS}")
    names = {spec.name for spec in manifest.tensors}
    if len(names) != len(manifest.tensors):
        raise _corrupt("the manifest lists a tensor twice")
    missing, extra = sorted(set(expected) - names), sorted(names - set(expected))
    if missing or extra:
        raise precondition(
            Reason.WEIGHTS_MISMATCH,
            f"the weights are not this model's: missing {missing[:3]} ({len(missing)} in all), "
            f"unknown {extra[:3]} ({len(extra)} in all)",
        )
    offset = 0
    for spec in manifest.tensors:
        layout = expected[spec.name]
        if spec.dtype != layout.dtype or tuple(spec.shape) != layout.shape:
            raise precondition(
                Reason.WEIGHTS_MISMATCH,
                f"tensor {spec.name} has {_layout_text(spec.dtype, spec.shape)}, "
                f"the model has {_layout_text(layout.dtype, layout.shape)}",
            )
        size = math.prod(spec.shape) * ELEMENT_BYTES[spec.dtype]
        if spec.encoding != weights_pb2.TENSOR_ENCODING_FULL or spec.byte_size != size or spec.payload_bytes != size:
            raise _corrupt(f"tensor {spec.name} announces {spec.payload_bytes} of {size} bytes or an unknown encoding")
        if spec.payload_offset != offset:
            raise _corrupt(f"tensor {spec.name} starts at byte {spec.payload_offset}, expected was byte {offset}")
        offset += size
    if manifest.payload_bytes != offset:
        raise _corrupt(f"the manifest announces {manifest.payload_bytes} bytes, its tensors have {offset}")
    if manifest.digest != weights_digest((spec.name, spec.sha256) for spec in manifest.tensors):
        raise _corrupt("the manifest's digest does not match its tensors")


def _layout_text(dtype: weights_pb2.DataType.ValueType, shape: Sequence[int]) -> str:
    return f"{weights_pb2.DataType.Name(dtype).removeprefix('DATA_TYPE_').lower()}{list(shape)}"


def _corrupt(message: str) -> RollwireError:
    return RollwireError(grpc.StatusCode.DATA_LOSS, Reason.WEIGHTS_CORRUPT, message)
