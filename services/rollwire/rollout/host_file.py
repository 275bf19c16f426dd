"""A set of weights as one file in shared memory, which the engine's processes map instead of receiving copies.

The file has no name: it is unlinked as soon as it is open and reached through the descriptor of the process that made
it, so nothing is left behind however that process ends. It lies in `/dev/shm` if that has room, else in the temporary
directory. No torch here.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np

from rollwire.rpc.limits import MIB
from rollwire.rpc.memory_file import FileMapping, HostMemoryError
from rollwire.rpc.weight_stream import ELEMENT_BYTES, HostTensor, TensorLayout
from rollwire.v1 import weights_pb2

ALIGNMENT_BYTES: Final = 64
"""Every tensor begins at a multiple of this: a cache line, and the widest vector register."""


class SharedMapping(FileMapping):
    """A nameless file, mapped. Its memory is freed when nobody uses this object, a view of it or another mapping.

    Args:
        size_bytes: Size, at least one byte.
        directories: Where the file may lie, best first; default `default_directories()`.

    Attributes:
        directory: Where the file lies.
        path: Path that processes of the same user on this host can open, as long as this object exists.

    Raises:
        HostMemoryError: No directory has room.
    """

    directory: Path
    path: str

    def __new__(cls, size_bytes: int, directories: Sequence[Path] | None = None) -> Self:
        """Reserves all of the space and maps it."""
        descriptor, directory = _open_nameless(size_bytes, directories or default_directories())
        mapping = super().__new__(cls, descriptor, size_bytes)
        mapping.directory = directory
        mapping.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        return mapping


def shared_memory(size_bytes: int) -> memoryview:
    """Allocates memory that `HostFile.around` recognises; the `allocate` of `rpc.weight_buffers.HostBuffers`.

    Raises:
        HostMemoryError: No directory has room.
    """
    return memoryview(SharedMapping(max(size_bytes, 1)))


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Where one tensor lies.

    Attributes:
        name: Name of the tensor.
        dtype: Element type.
        shape: Extents, outermost first.
        offset: First byte, a multiple of `ALIGNMENT_BYTES`.
        size_bytes: Row-major little-endian bytes, without padding.
    """

    name: str
    dtype: weights_pb2.DataType.ValueType
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


def file_entries(layouts: Mapping[str, TensorLayout]) -> list[FileEntry]:
    """Lays tensors out one after the other, in the order given."""
    entries: list[FileEntry] = []
    offset = 0
    for name, layout in layouts.items():
        size = math.prod(layout.shape) * ELEMENT_BYTES[layout.dtype]
        entries.append(FileEntry(name, layout.dtype, layout.shape, offset, size))
        offset += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return entries


def default_directories() -> list[Path]:
    """Returns where files are made, best first."""
    return [Path("/dev/shm"), Path(tempfile.gettempdir())]  # noqa: S108 - unlinked at once, mode 0600


class HostFile(Mapping[str, HostTensor]):
    """Tensors in one shared file; as a mapping, name to tensor with writable memory.

    Args:
        entries: Where the tensors lie.
        memory: All of the file, whose `obj` is a `SharedMapping`.

    Attributes:
        entries: Where the tensors lie.
        path: As `SharedMapping.path`.
    """

    def __init__(self, entries: list[FileEntry], memory: memoryview) -> None:
        assert isinstance(memory.obj, SharedMapping)
        self.entries = entries
        self.path = memory.obj.path
        self._tensors = {
            entry.name: HostTensor(entry.dtype, entry.shape, memory[entry.offset : entry.offset + entry.size_bytes])
            for entry in entries
        }

    @classmethod
    def empty(cls, layouts: Mapping[str, TensorLayout]) -> HostFile:
        """Returns a file of its own for tensors of these layouts.

        Raises:
            HostMemoryError: No directory has room.
        """
        entries = file_entries(layouts)
        return cls(entries, shared_memory(max((entry.offset + entry.size_bytes for entry in entries), default=0)))

    @classmethod
    def around(cls, tensors: Mapping[str, HostTensor]) -> HostFile:
        """Returns a file with these tensors: the one they lie in, if it is one and they are aligned, else a copy.

        Raises:
            HostMemoryError: No directory has room for the copy.
        """
        entries = _entries_in_place(tensors)
        if entries is not None:
            mapping = next(iter(tensors.values())).data.obj
            return cls(entries, memoryview(mapping))  # type: ignore[arg-type]
        file = cls.empty({name: TensorLayout(tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            file[name].data[:] = tensor.data.cast("B")
        return file

    def __getitem__(self, name: str) -> HostTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _entries_in_place(tensors: Mapping[str, HostTensor]) -> list[FileEntry] | None:
    """Returns where tensors lie in the one shared mapping that holds them all; None if there is no such mapping."""
    mappings = {id(tensor.data.obj): tensor.data.obj for tensor in tensors.values()}
    mapping = next(iter(mappings.values()), None)
    if len(mappings) != 1 or not isinstance(mapping, SharedMapping):
        return None
    start = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    entries = []
    for name, tensor in tensors.items():
        offset = np.frombuffer(tensor.data, dtype=np.uint8).ctypes.data - start
        if offset % ALIGNMENT_BYTES:
            return None
        entries.append(FileEntry(name, tensor.dtype, tensor.shape, offset, tensor.data.nbytes))
    return entries


def _open_nameless(size_bytes: int, directories: Sequence[Path]) -> tuple[int, Path]:
    """Opens an unlinked file with all of its space reserved; returns descriptor and directory."""
    refusals = []
    for directory in directories:
        if directory.is_dir() and (free := _free_bytes(directory)) < size_bytes:
            refusals.append(f"{directory} has {free // MIB} MiB free")
            continue
        try:
            descriptor, name = tempfile.mkstemp(prefix="rollwire-weights-", dir=directory)
        except OSError as error:
            refusals.append(f"{directory} cannot be written ({error.strerror})")
            continue
        Path(name).unlink()
        try:
            # Without the reservation a full file system would kill the process that writes to the mapping.
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            os.close(descriptor)
            refusals.append(f"{directory} gives no room ({error.strerror})")
            continue
        return descriptor, directory
    raise HostMemoryError(
        f"the weights need {-(-size_bytes // MIB)} MiB of shared memory, but {' and '.join(refusals)}; "
        "make room, enlarge /dev/shm, or set TMPDIR to a larger file system"
    )


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
