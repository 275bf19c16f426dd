"""The sender's side of a weight stream, and the names that senders and receivers of weights need.

The sender describes its tensors in a manifest and cuts their bytes into chunks; the receiver is `WeightAssembler`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollwire.rpc.limits import CHUNK_BYTES
from rollwire.rpc.weight_assembler import HeldWeights, WeightAssembler, receive_weights
from rollwire.rpc.weight_manifest import (
    ELEMENT_BYTES,
    MAX_NAME_LENGTH,
    MAX_TENSORS,
    HostTensor,
    TensorLayout,
    build_manifest,
    check_manifest,
)
from rollwire.rpc.weight_wire import write_chunks, write_commit, write_manifest
from rollwire.v1 import weights_pb2

__all__ = [
    "ELEMENT_BYTES",
    "MAX_NAME_LENGTH",
    "MAX_TENSORS",
    "HeldWeights",
    "HostTensor",
    "TensorLayout",
    "WeightAssembler",
    "build_manifest",
    "check_manifest",
    "receive_weights",
    "stream_messages",
    "stream_wire",
]


def stream_wire(
    manifest: weights_pb2.WeightManifest, payloads: Iterator[memoryview], chunk_bytes: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """Yields the serialised messages of one stream.

    Args:
        manifest: Table of contents.
        payloads: Pieces of the payload in the manifest's order, as flat bytes.
        chunk_bytes: Largest payload of a chunk. Chunks run across tensors, so that many small tensors share one.
    """
    yield write_manifest(manifest)
    for chunk in write_chunks(payloads, chunk_bytes):
        yield chunk.message
    yield write_commit(manifest)


def stream_messages(
    manifest: weights_pb2.WeightManifest, payloads: Sequence[memoryview], chunk_bytes: int = CHUNK_BYTES
) -> Iterator[weights_pb2.FetchWeightsResponse]:
    """Yields the messages of one stream as `stream_wire` does, parsed."""
    for message in stream_wire(manifest, iter(payloads), chunk_bytes):
        yield weights_pb2.FetchWeightsResponse.FromString(message)
