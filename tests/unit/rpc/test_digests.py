"""Digests of tensors: the published function, and no dependency of those who handle no weights."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rollwire.rpc.digests import tensor_digest, tensor_hasher

# From BLAKE3's test vectors: the input is 0, 1, ..., 250, 0, 1, ... of that length.
VECTORS = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1025: "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
    102400: "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
}


@pytest.mark.parametrize(("length", "expected"), VECTORS.items())
def test_a_tensor_digest_is_blake3(length: int, expected: str) -> None:
    data = bytes(at % 251 for at in range(length))
    assert tensor_digest(data).hex() == tensor_digest(memoryview(data)).hex() == expected
    hasher = tensor_hasher()
    for start in range(0, length, 1000):
        hasher.update(memoryview(data)[start : start + 1000])
    assert hasher.digest().hex() == expected


def test_only_what_handles_weights_needs_the_package() -> None:
    code = (
        "import sys; sys.modules['blake3'] = None; import rollwire.client, rollwire.client.weights; "
        "from rollwire.rpc.digests import tensor_hasher\n"
        "try: tensor_hasher()\nexcept ModuleNotFoundError as error: print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "install rollwire[learner] or rollwire[rollout]" in shown.stdout
