"""Weights as one nameless file in shared memory."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollwire.rollout.host_file import (
    ALIGNMENT_BYTES,
    HostFile,
    SharedMapping,
    file_entries,
    shared_memory,
)
from rollwire.rpc.memory_file import HostMemoryError
from rollwire.rpc.weight_buffers import HostBuffers
from rollwire.rpc.weight_stream import HostTensor, TensorLayout
from rollwire.v1 import weights_pb2

F32 = weights_pb2.DATA_TYPE_FLOAT32
BF16 = weights_pb2.DATA_TYPE_BFLOAT16
LAYOUTS = {"odd": TensorLayout(BF16, (3, 5)), "scalar": TensorLayout(F32, ()), "matrix": TensorLayout(F32, (17, 4))}


def private_tensors() -> dict[str, HostTensor]:
    return {
        entry.name: HostTensor(entry.dtype, entry.shape, memoryview(bytearray(os.urandom(entry.size_bytes))))
        for entry in file_entries(LAYOUTS)
    }


def contents(tensors: HostFile | dict[str, HostTensor]) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in tensors.items()}


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_entries_are_aligned_and_do_not_overlap() -> None:
    entries = file_entries(LAYOUTS)
    assert [entry.size_bytes for entry in entries] == [30, 4, 272]
    assert all(entry.offset % ALIGNMENT_BYTES == 0 for entry in entries)
    for before, after in itertools.pairwise(entries):
        assert before.offset + before.size_bytes <= after.offset


def test_another_process_reads_the_same_bytes() -> None:
    tensors = private_tensors()
    file = HostFile.around(tensors)
    script = "import sys; data = open(sys.argv[1], 'rb').read(); sys.stdout.buffer.write(data)"
    read = subprocess.run([sys.executable, "-c", script, file.path], capture_output=True, check=True).stdout
    for entry in file.entries:
        assert read[entry.offset : entry.offset + entry.size_bytes] == bytes(tensors[entry.name].data)
    assert contents(file) == contents(tensors)


def test_writes_of_another_mapping_are_seen() -> None:
    file = HostFile.empty(LAYOUTS)
    descriptor = os.open(file.path, os.O_RDWR)
    other = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    other[0:4] = b"\x01\x02\x03\x04"
    assert bytes(file["odd"].data[:4]) == b"\x01\x02\x03\x04"


def test_tensors_in_shared_memory_are_not_copied() -> None:
    buffer = HostBuffers(shared_memory).take(4096)
    tensors = {
        entry.name: HostTensor(
            entry.dtype, entry.shape, buffer[64 + entry.offset : 64 + entry.offset + entry.size_bytes]
        )
        for entry in file_entries(LAYOUTS)
    }
    file = HostFile.around(tensors)
    file["matrix"].data[:4] = b"same"
    assert bytes(tensors["matrix"].data[:4]) == b"same"
    assert [entry.offset for entry in file.entries] == [64 + entry.offset for entry in file_entries(LAYOUTS)]


def test_unaligned_and_mixed_tensors_are_copied() -> None:
    tensors = private_tensors()
    for start in (1, 64):
        buffer = shared_memory(4096)
        buffer[start : start + 30] = tensors["odd"].data
        mixed = {**tensors, "odd": HostTensor(BF16, (3, 5), buffer[start : start + 30])}
        for given in (mixed, {"odd": mixed["odd"]} if start == 1 else mixed):
            file = HostFile.around(given)
            assert contents(file) == contents(given)
            file["odd"].data[:4] = b"copy"
            assert bytes(given["odd"].data[:4]) != b"copy"


def test_nothing_is_left_in_the_directory_or_open(tmp_path: Path) -> None:
    before = open_files()
    mapping = SharedMapping(100, [tmp_path])
    view, path = memoryview(mapping)[10:20], mapping.path
    assert list(tmp_path.iterdir()) == []
    del mapping
    assert Path(path).exists(), "a view keeps the file open"
    del view
    gc.collect()
    assert open_files() == before


def test_falls_back_when_the_first_directory_is_missing(tmp_path: Path) -> None:
    assert SharedMapping(100, [tmp_path / "missing", tmp_path]).directory == tmp_path


def test_no_room_anywhere_is_one_line_and_leaks_nothing() -> None:
    before = open_files()
    for _ in range(3):
        with pytest.raises(
            HostMemoryError, match=r"need \d+ MiB of shared memory, but /dev/shm has \d+ MiB free and .*make room"
        ):
            HostFile.empty({"huge": TensorLayout(F32, (1 << 48,))})
    assert open_files() == before
