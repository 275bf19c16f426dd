"""Files in memory: what cannot be mapped leaves no descriptor open."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rollwire.rpc.memory_file import FileMapping, GrowingFile, HostMemoryError, memory_file
from rollwire.rpc.weight_buffers import HostBuffers, anonymous_memory

# More than an address space has, and less than the size that a file may have.
TOO_MUCH = 1 << 52


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def mapped() -> None:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, TOO_MUCH)
    FileMapping(descriptor, TOO_MUCH)


def grown() -> None:
    GrowingFile().mapped(TOO_MUCH)


@pytest.mark.parametrize("make", [mapped, grown, lambda: memory_file(TOO_MUCH), lambda: anonymous_memory(TOO_MUCH)])
def test_what_there_is_no_room_for_is_an_error_and_leaves_nothing(make: Callable[[], object]) -> None:
    before = descriptors()
    with pytest.raises(HostMemoryError, match=r"need \d+ MiB of host memory, which there is no room for"):
        make()
    assert descriptors() <= before


def test_a_buffer_that_was_not_had_is_not_counted() -> None:
    buffers = HostBuffers(memory_file)
    with pytest.raises(HostMemoryError):
        buffers.take(TOO_MUCH)
    assert buffers.taken == 0
    buffers.give_back(buffers.take(10))


def test_a_mapping_owns_its_descriptor() -> None:
    before = descriptors()
    memory = memory_file(10)
    memory[:2] = b"ab"
    assert isinstance(memory.obj, FileMapping) and os.pread(memory.obj.descriptor, 2, 0) == b"ab"
    del memory
    assert descriptors() <= before
