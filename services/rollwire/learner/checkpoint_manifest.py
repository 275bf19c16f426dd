"""The table of contents of a checkpoint, and what is wrong with one. Pure."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc

from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import weights_pb2

MANIFEST: Final = "manifest.json"
"""Name of its file."""

FORMAT: Final = 1
"""Raised when an older build could not read a checkpoint any more."""


@dataclass(frozen=True)
class FileEntry:
    """What the manifest says about a file.

    Attributes:
        size: Bytes.
        sha256: Digest in hexadecimal digits.
    """

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Table of contents of a complete checkpoint.

    Attributes:
        name: Name of the checkpoint.
        run_id: Run that it belongs to.
        version: Version that it holds.
        written_ns: When it was written, in nanoseconds since 1970; orders checkpoints for retention alone.
        files: What it knows about each file but itself, by name.
        digest: SHA-256 of the manifest file.
    """

    name: str
    run_id: str
    version: weights_pb2.WeightVersion
    written_ns: int
    files: dict[str, FileEntry]
    digest: bytes = b""

    @property
    def total_bytes(self) -> int:
        """Size of all files that it lists."""
        return sum(entry.size for entry in self.files.values())


def new_manifest(
    name: str, run_id: str, version: weights_pb2.WeightVersion, files: Mapping[str, FileEntry]
) -> Manifest:
    """Returns the manifest of a checkpoint written now."""
    return Manifest(name, run_id, version, time.time_ns(), dict(files))


def encode(manifest: Manifest) -> bytes:
    """Returns the manifest's file."""
    content = {
        "format": FORMAT,
        "name": manifest.name,
        "run_id": manifest.run_id,
        "version": {"lineage": manifest.version.lineage, "step": manifest.version.step},
        "written_ns": manifest.written_ns,
        "files": {
            file: {"bytes": entry.size, "sha256": entry.sha256} for file, entry in sorted(manifest.files.items())
        },
    }
    return _text_of(content)


def decode(name: str, data: bytes) -> Manifest:
    """Returns what the manifest's file says.

    Raises:
        RollwireError: DATA_LOSS / `CHECKPOINT_CORRUPT`; FAILED_PRECONDITION / `CHECKPOINT_MISMATCH` for a newer format.
    """
    try:
        parsed = json.loads(data)
        content = parsed["content"]
        intact = parsed["sha256"] == _content_digest(content)
    except (ValueError, KeyError, TypeError):
        intact = False
    if intact and content["format"] > FORMAT:
        raise RollwireError(
            grpc.StatusCode.FAILED_PRECONDITION,
            Reason.CHECKPOINT_MISMATCH,
            f"checkpoint {name} has format {content['format']}; this build reads formats up to {FORMAT}: update it",
            metadata={"name": name},
        )
    if not intact or _text_of(content) != data:
        raise corrupt(name, MANIFEST, "was changed: its SHA-256 is another one")
    files = {file: FileEntry(entry["bytes"], entry["sha256"]) for file, entry in content["files"].items()}
    return Manifest(
        content["name"],
        content["run_id"],
        weights_pb2.WeightVersion(**content["version"]),
        content["written_ns"],
        files,
        hashlib.sha256(data).digest(),
    )


def _text_of(content: Any) -> bytes:
    return (json.dumps({"content": content, "sha256": _content_digest(content)}, indent=1) + "\n").encode()


def _content_digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":"), sort_keys=True).encode()).hexdigest()


def corrupt(name: str, file: str, what: str) -> RollwireError:
    """Returns the error for a damaged file of a checkpoint."""
    return RollwireError(
        grpc.StatusCode.DATA_LOSS,
        Reason.CHECKPOINT_CORRUPT,
        f"checkpoint {name} is damaged: {file} {what}; other checkpoints may be intact",
        metadata={"name": name, "file": file},
    )
