"""Memory that another process on this host can read through a file descriptor: files that lie in memory, without names.

Such a file is reached only through its descriptor, so nothing is left behind however its process ends.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Self

from rollwire.rpc.limits import MIB
from rollwire.v1 import weights_pb2


class HostMemoryError(Exception):
    """There is no room for the weights in host memory; the text is one line."""


class FileMapping(mmap.mmap):
    """A mapped file whose descriptor stays open as long as this object or a view of it exists.

    Args:
        descriptor: An open file, closed by this object from now on, also if it cannot be mapped.
        size_bytes: How much of it is mapped.

    Attributes:
        descriptor: The file.

    Raises:
        HostMemoryError: There is no room for it.
    """

    descriptor: int = -1  # none, for an object that could not be made

    def __new__(cls, descriptor: int, size_bytes: int) -> Self:
        """Maps the file."""
        try:
            mapping = super().__new__(cls, descriptor, size_bytes)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise no_room(size_bytes, error) from error
            raise
        mapping.descriptor = descriptor
        return mapping

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def memory_file(size_bytes: int) -> memoryview:
    """Returns zeroed memory of at least one byte whose `obj` is a `FileMapping`.

    Raises:
        HostMemoryError: There is no room for it.
    """
    descriptor = os.memfd_create("rollwire-weights")
    try:
        os.ftruncate(descriptor, max(size_bytes, 1))
    except OSError as error:
        os.close(descriptor)
        raise no_room(size_bytes, error) from error
    return memoryview(FileMapping(descriptor, max(size_bytes, 1)))


class GrowingFile:
    """A file in memory that is written from front to back, again and again, and read through a mapping.

    Attributes:
        size_bytes: Its present size.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("rollwire-weights")
        self._mapping: FileMapping | None = None
        self.size_bytes = 0

    def __del__(self) -> None:
        os.close(self._descriptor)

    def write(self, data: memoryview, offset: int) -> None:
        """Writes bytes at a place; other threads run meanwhile."""
        while data:
            count = os.pwrite(self._descriptor, data, offset)
            data, offset = data[count:], offset + count

    def mapped(self, size_bytes: int) -> FileMapping:
        """Sets the size and returns the file's memory; views of an earlier size must not be read beyond the new one."""
        if self._mapping is None or size_bytes != self.size_bytes:
            self._mapping = None
            os.ftruncate(self._descriptor, max(size_bytes, 1))
            self._mapping = FileMapping(os.dup(self._descriptor), max(size_bytes, 1))
            self.size_bytes = size_bytes
        return self._mapping


def no_room(size_bytes: int, error: OSError) -> HostMemoryError:
    """Returns the error for memory that the kernel does not give."""
    return HostMemoryError(
        f"the weights need {-(-size_bytes // MIB)} MiB of host memory, which there is no room for ({error.strerror}); "
        "free memory, or raise the limit of this process"
    )


@dataclass(frozen=True)
class SharedVersion:
    """A version in a file that can be handed to another process.

    Attributes:
        manifest: The manifest that sends it in full.
        file: The file.
        offsets: Where each tensor begins in it, in the manifest's order.
    """

    manifest: weights_pb2.WeightManifest
    file: FileMapping
    offsets: list[int]
