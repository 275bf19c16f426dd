"""Host memory for received weights that is used again from update to update.

Touching fresh memory for the first time costs more than the network: the kernel clears each page. Two buffers that take
turns avoid that: one holds the version in use, the other one receives the next.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from threading import Lock
from typing import Final

from rollwire.rpc.memory_file import no_room

MAX_BUFFERS: Final = 2


class BuffersExhaustedError(RuntimeError):
    """A third buffer was asked for: an older version must be released first."""


def anonymous_memory(size_bytes: int) -> memoryview:
    """Allocates private memory in huge pages where the kernel has them; at least one byte.

    Raises:
        HostMemoryError: There is no room for it.
    """
    try:
        memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise no_room(size_bytes, error) from error
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


class HostBuffers:
    """At most two buffers. Thread-safe.

    Args:
        allocate: Returns writable memory of at least the given size; a file in shared memory, for example. A buffer
            that is too small for the next version is dropped, and freed when nothing refers to it any more.
    """

    def __init__(self, allocate: Callable[[int], memoryview] = anonymous_memory) -> None:
        self._allocate = allocate
        self._free: list[memoryview] = []
        self._taken = 0
        self._lock = Lock()

    @property
    def taken(self) -> int:
        """Number of buffers in use."""
        return self._taken

    def take(self, size_bytes: int) -> memoryview:
        """Returns a buffer of at least `size_bytes`, used before if possible.

        Raises:
            BuffersExhaustedError: Both are in use.
            HostMemoryError: There is no room for another one.
        """
        with self._lock:
            if self._taken == MAX_BUFFERS:
                raise BuffersExhaustedError(f"{MAX_BUFFERS} versions are held in host memory; release one first")
            self._taken += 1
            fitting = [buffer for buffer in self._free if buffer.nbytes >= size_bytes]
            self._free = fitting[1:]
        try:
            return fitting[0] if fitting else self._allocate(size_bytes)
        except BaseException:
            with self._lock:
                self._taken -= 1
            raise

    def give_back(self, buffer: memoryview) -> None:
        """Takes a buffer back; what was in it may be overwritten at any time from now on."""
        with self._lock:
            self._taken -= 1
            self._free.append(buffer)
