"""Watches a model load weights: which bytes of the source went where. Knows no engine and no architecture.

Engines fuse, split and slice checkpoint tensors in hundreds of loaders, all of which end in copies out of views of the
tensors they were given. Seeing these copies is enough to tell, for any architecture and any rank of a sharded model,
whether every tensor arrived bit for bit, whether a parameter kept old values, and to read everything back under the
names and in the layout of the checkpoint.
"""

from __future__ import annotations

import bisect
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollwire.rollout.host_file import FileEntry
from rollwire.serving.model_tensors import TORCH_TYPES

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MappedWeights:
    """The tensors of a `HostFile` in a process that only has its path.

    Args:
        path: `HostFile.path`.
        entries: `HostFile.entries`.
        writable: Share writes with the other mappings; otherwise they stay in this process.

    Attributes:
        entries: Where the tensors lie, in this order.
        tensors: The tensors by name, without copies.
    """

    def __init__(self, path: str, entries: Sequence[FileEntry], *, writable: bool = False) -> None:
        self.entries = sorted(entries, key=lambda entry: entry.offset)
        size = max((entry.offset + entry.size_bytes for entry in entries), default=1)
        descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            mapping = mmap.mmap(descriptor, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self._starts = [entry.offset for entry in self.entries]
        self.tensors = {
            entry.name: self._bytes[entry.offset : entry.offset + entry.size_bytes]
            .view(TORCH_TYPES[entry.dtype])
            .view(entry.shape)
            for entry in self.entries
        }

    def locate(self, tensor: torch.Tensor) -> tuple[FileEntry, int] | None:
        """Returns the entry that a view begins in and its first element's index there; None for foreign memory."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.numel() == 0:
            return None
        position = tensor.data_ptr() - self._bytes.data_ptr()
        if not 0 <= position < self._bytes.numel():
            return None
        entry = self.entries[bisect.bisect_right(self._starts, position) - 1]
        return entry, (position - entry.offset) // tensor.element_size()


@dataclass(frozen=True, eq=False)
class Part:
    """A piece of a source tensor and the memory it was copied to.

    Attributes:
        first: Index of its first element in the source tensor.
        size: Extents.
        stride: Strides in the source tensor, in elements.
        destination: What the engine holds, of the same extents.
    """

    first: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    destination: torch.Tensor

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this piece of a tensor with the source's layout."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.first)


Parts = dict[str, list[Part]]
"""Where the pieces of each tensor of a checkpoint are, by its name."""


class CopyWatch(TorchDispatchMode):  # type: ignore[misc, no-untyped-call]
    """Records, while active, where the contents of mapped weights are copied.

    Args:
        source: The weights that are being loaded.

    Attributes:
        parts: Pieces by name of the source tensor.
        transformed: Names that something other than a copy has read, so that what is held cannot be traced to them.
    """

    def __init__(self, source: MappedWeights) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._source = source
        self.parts: Parts = {entry.name: [] for entry in source.entries}
        self.transformed: set[str] = set()
        self._written: list[torch.Tensor] = []
        self._read_as_number: torch.Tensor | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation and notes what it did with the source."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._copied(args[0], args[1])
        elif func is torch.ops.aten.fill_.Scalar:
            # Loaders copy tensors of one element through a Python number.
            self._copied(args[0], args[0] if self._read_as_number is None else self._read_as_number)
        elif func is torch.ops.aten._local_scalar_dense.default:
            self._read_as_number = args[0]
        elif not (isinstance(result, torch.Tensor) and self._locate(result) is not None):  # not a view of the source
            for argument in args:
                self._note_transformed(argument)
        return result

    def unwritten(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Returns the names of parameters that were not written completely."""
        written: dict[int, dict[Any, int]] = {}
        for view in self._written:
            key = (view.data_ptr(), tuple(view.shape), view.stride())
            written.setdefault(view.untyped_storage().data_ptr(), {})[key] = view.numel()
        return [
            name
            for name, parameter in parameters
            if sum(written.get(parameter.untyped_storage().data_ptr(), {}).values()) < parameter.numel()
        ]

    def touched(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Returns the parameters of which anything was written."""
        written = {view.untyped_storage().data_ptr() for view in self._written}
        return [parameter for parameter in parameters if parameter.untyped_storage().data_ptr() in written]

    def held(self) -> dict[str, int]:
        """Returns how many elements of each source tensor are held here."""
        return held_elements(self.parts)

    def differing(self) -> list[str]:
        """Returns the names of tensors of which any held piece is not bit for bit the source's."""
        tensors = self._source.tensors
        return [
            name
            for name, parts in self.parts.items()
            if not all(same_bits(part.destination, part.of(tensors[name])) for part in parts)
        ]

    def _copied(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._read_as_number = None
        self._written.append(destination)
        place = self._locate(source)
        if place is None:
            return
        entry, first = place
        if source.dtype != TORCH_TYPES[entry.dtype] or source.numel() != destination.numel():
            self.transformed.add(entry.name)
            return
        seen = source.expand(destination.shape)
        self.parts[entry.name].append(Part(first, tuple(seen.shape), seen.stride(), destination))

    def _note_transformed(self, argument: Any) -> None:
        if isinstance(argument, torch.Tensor) and (place := self._locate(argument)) is not None:
            self.transformed.add(place[0].name)
        elif isinstance(argument, list | tuple):
            for item in argument:
                self._note_transformed(item)

    def _locate(self, tensor: torch.Tensor) -> tuple[FileEntry, int] | None:
        return self._source.locate(tensor)


def held_elements(parts: Parts) -> dict[str, int]:
    """Returns how many elements of each tensor are somewhere; a piece that is in two places counts once."""
    distinct = {name: {(part.first, part.size, part.stride) for part in pieces} for name, pieces in parts.items()}
    return {name: sum(math.prod(size) for _, size, _ in pieces) for name, pieces in distinct.items()}


def read_back(parts: Parts, target: MappedWeights) -> None:
    """Writes what is held into a file with the checkpoint's layout."""
    with torch.no_grad():
        for name, pieces in parts.items():
            for part in pieces:
                part.of(target.tensors[name]).copy_(part.destination)


def same_bits(held: torch.Tensor, sent: torch.Tensor) -> bool:
    """Compares after widening or narrowing to the type that was sent; a NaN equals itself."""
    back = held.detach().to(device="cpu", dtype=sent.dtype).contiguous()
    bits = _BITS[sent.element_size()]
    return torch.equal(back.view(bits), sent.contiguous().view(bits))
