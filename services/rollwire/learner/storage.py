"""Writing to a disk that may refuse, such that what was written is there after a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import grpc

from rollwire.rpc.errors import Reason, RollwireError

_RUST_REFUSAL: Final = "(os error "  # safetensors and tokenizers raise exceptions of their own, with the system's text


def write_durably(path: Path, data: bytes) -> None:
    """Writes a file and waits until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Waits until the disk has a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_refusal(error: BaseException) -> bool:
    """Says whether an exception is the disk's: no space, no permission, or broken."""
    return isinstance(error, OSError) or _RUST_REFUSAL in str(error)


def storage_failed(what: str, name: str, error: BaseException) -> RollwireError:
    """Returns the error for a disk that refuses.

    Args:
        what: What was to be written, such as `checkpoint`.
        name: Its name.
        error: The refusal.
    """
    cause = " ".join(str(error).split())
    if isinstance(error, OSError):
        cause = f"{error.strerror or error}{f' {error.filename}' if error.filename else ''}"
    return RollwireError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.STORAGE_FAILED,
        f"{what} {name} cannot be written: {cause}; nothing is left of it. Free space or permit writing",
        metadata={"name": name},
    )
