"""Digests of the contract: of a training batch, of a tensor and of a set of weights. Pure functions."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from rollwire.v1 import learner_pb2


def samples_digest(samples: Iterable[learner_pb2.TrainSample]) -> bytes:
    """Returns `TrainCommit.digest` (32 bytes) of samples in the order sent."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.sample_id.encode())
        digest.update(struct.pack("<BQ", 0, len(sample.token_ids)))
        digest.update(np.fromiter(sample.token_ids, dtype="<i4").tobytes())
        digest.update(np.fromiter(sample.loss_mask, dtype=np.uint8).tobytes())
        digest.update(np.fromiter(sample.advantages, dtype="<f4").tobytes())
        digest.update(np.fromiter(sample.logprobs, dtype="<f4").tobytes())
        for optional in (sample.reference_logprobs, sample.returns, sample.values):
            digest.update(b"\1" if optional else b"\0")
            digest.update(np.fromiter(optional, dtype="<f4").tobytes())
    return digest.digest()


class TensorHasher(Protocol):
    """Makes `TensorSpec.digest` from a tensor's bytes as they come."""

    def update(self, data: bytes | bytearray | memoryview, /) -> object:
        """Takes the next bytes; other threads run meanwhile."""

    def digest(self) -> bytes:
        """Returns the digest (32 bytes) of the bytes taken so far."""


def tensor_hasher() -> TensorHasher:
    """Returns the hash function of tensors: BLAKE3, on this machine about three times as fast as SHA-256.

    Raises:
        ModuleNotFoundError: The package `blake3` is not installed. Only what sends or receives weights needs it.
    """
    try:
        from blake3 import blake3
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "weights cannot be verified without the package blake3; install rollwire[learner] or rollwire[rollout]",
            name="blake3",
        ) from error
    hasher: TensorHasher = blake3()
    return hasher


def tensor_digest(data: bytes | bytearray | memoryview) -> bytes:
    """Returns `TensorSpec.digest` (32 bytes) of a tensor's row-major little-endian bytes."""
    hasher = tensor_hasher()
    hasher.update(data)
    return hasher.digest()


def weights_digest(tensors: Iterable[tuple[str, bytes]]) -> bytes:
    """Returns `WeightManifest.digest` (32 bytes).

    Args:
        tensors: Name and `TensorSpec.digest` (32 bytes) of each tensor, in any order.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted((name.encode(), tensor) for name, tensor in tensors):
        digest.update(name)
        digest.update(b"\0")
        digest.update(tensor)
    return digest.digest()
