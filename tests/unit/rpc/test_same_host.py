"""Handing a version over as a file: only within one user on one host, and only what the digests confirm."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rollwire.rpc import same_host
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.memory_file import FileMapping, GrowingFile, memory_file
from rollwire.rpc.same_host import HandOverError, SameHostOffer, hand_over, read_exactly
from rollwire.rpc.weight_buffers import HostBuffers
from rollwire.rpc.weight_publisher import WeightPublisher
from rollwire.rpc.weight_relay import WeightRelay
from rollwire.rpc.weight_stream import HeldWeights, TensorLayout, WeightAssembler
from rollwire.v1 import weights_pb2

BF16 = weights_pb2.DATA_TYPE_BFLOAT16
LAYOUTS = {
    "large": TensorLayout(BF16, (900, 1000)),
    "odd": TensorLayout(BF16, (3,)),
    "mid": TensorLayout(BF16, (50_000,)),
}
NAME = "rollwire-" + "0" * 32


def _words(seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.integers(0, 1 << 16, layout.elements).astype("<u2") for name, layout in LAYOUTS.items()}


def _publish(publisher: WeightPublisher, step: int) -> None:
    tensors = ((name, LAYOUTS[name], [memoryview(part).cast("B")]) for name, part in _words(step).items())
    publisher.publish(weights_pb2.WeightVersion(lineage="line", step=step), tensors)


def _take_over(source: WeightPublisher | WeightRelay, threads: int = 0) -> HeldWeights:
    """Does what server and reader do, in one process."""
    with SameHostOffer() as offer:
        stream = source.open(weights_pb2.FetchWeightsRequest(same_host_socket=offer.name))
        assert stream.shared is not None and hand_over(offer.name, stream.shared.file.descriptor)
        version, buffers = stream.manifest.version, HostBuffers(memory_file)
        with WeightAssembler(LAYOUTS, version, threads=threads, buffers=buffers, take_file=offer.take) as assembler:
            for message in stream.handed_over():
                assembler.feed(message)
            held = assembler.result()
    assert assembler.copied and assembler.received_bytes == 0
    return held


def _holds(held: HeldWeights, step: int) -> bool:
    return {name: bytes(tensor.data) for name, tensor in held.tensors.items()} == {
        name: part.tobytes() for name, part in _words(step).items()
    }


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("threads", [0, 2])
def test_a_version_goes_from_learner_to_reader_and_on_to_the_next(threads: int) -> None:
    publisher, relay = WeightPublisher(threads=threads), WeightRelay()
    open_before = _open_files()
    for step in range(3):
        _publish(publisher, step)
        first = _take_over(publisher, threads)
        relay.hold(first)
        second = _take_over(relay, threads)
        assert first.digest == second.digest == publisher.manifest.digest
        assert _holds(first, step) and _holds(second, step)
    relay.hold(second)
    del first, second, relay
    assert _open_files() == open_before + 2  # the publisher's mapping


def test_private_memory_and_changes_are_not_handed_over() -> None:
    publisher, relay = WeightPublisher(threads=0), WeightRelay()
    _publish(publisher, 0)
    with WeightAssembler(LAYOUTS, publisher.manifest.version, threads=0) as assembler:
        for message in publisher.open(weights_pb2.FetchWeightsRequest()):
            assembler.feed(message)
        relay.hold(assembler.result())
    assert relay.open(weights_pb2.FetchWeightsRequest()).shared is None
    accepted = [
        weights_pb2.TENSOR_ENCODING_FULL,
        weights_pb2.TENSOR_ENCODING_UNCHANGED,
        weights_pb2.TENSOR_ENCODING_SPARSE,
    ]
    request = weights_pb2.FetchWeightsRequest(have=publisher.manifest.version, accepted_encodings=accepted)
    assert publisher.open(request).shared is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "../rollwire-" + "0" * 32,
        "/dev/shm/" + NAME,
        NAME + "/",
        NAME + "\n",
        NAME[:-1],
        NAME.upper(),
        NAME + "0",
    ],
)
def test_names_of_another_form_are_never_looked_for(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "lstat", lambda path: pytest.fail(f"{path} was looked for"))
    assert not hand_over(name, 0, tmp_path)


def _listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(1)
    return listener


def _link(path: Path) -> socket.socket:
    path.symlink_to(path.with_name("elsewhere"))
    return _listening(path.with_name("elsewhere"))


def _deaf(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    return listener


HOSTILE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "a file": lambda path: path.write_text("secret"),
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a link to a socket": _link,
    "nobody listens": _deaf,
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_listening_socket_gets_nothing(make: Callable[[Path], object], tmp_path: Path) -> None:
    kept = make(tmp_path / NAME)
    assert not hand_over(NAME, memory_file(10).obj.descriptor, tmp_path)
    if isinstance(kept, socket.socket):
        kept.close()


def test_other_users_neither_get_nor_give_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = memory_file(10)
    assert isinstance(shared.obj, FileMapping)
    with SameHostOffer(directory=tmp_path) as offer:
        monkeypatch.setattr(same_host, "_peer_user", lambda connection: os.geteuid() + 1)
        assert not hand_over(offer.name, shared.obj.descriptor, tmp_path)
        with pytest.raises(HandOverError, match="another user"):
            offer.take()
        monkeypatch.undo()
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)  # now the socket is another user's
        assert not hand_over(offer.name, shared.obj.descriptor, tmp_path)


def test_a_file_is_handed_over_for_reading_only_and_closed_with_the_offer(tmp_path: Path) -> None:
    shared = memory_file(5)
    shared[:] = b"12345"
    assert isinstance(shared.obj, FileMapping)
    with SameHostOffer(directory=tmp_path) as offer:
        with pytest.raises(HandOverError, match="no file came"):
            offer.take()
        assert hand_over(offer.name, shared.obj.descriptor, tmp_path)
        descriptor = offer.take()
        target = bytearray(3)
        read_exactly(descriptor, memoryview(target), 1)
        assert target == b"234"
        with pytest.raises(OSError):
            os.pwrite(descriptor, b"9", 0)
        for offset in (3, 5, 1 << 40, (1 << 64) - 1):
            with pytest.raises(HandOverError, match="the file"):
                read_exactly(descriptor, memoryview(target), offset)
    with pytest.raises(OSError):
        os.fstat(descriptor)
    assert not list(tmp_path.iterdir())


def test_what_comes_must_be_a_regular_file(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with SameHostOffer(directory=tmp_path) as offer:
        assert hand_over(offer.name, reading, tmp_path)
        with pytest.raises(HandOverError, match="no file"):
            offer.take()
    os.close(reading)
    os.close(writing)


def test_without_a_directory_or_when_switched_off_nothing_is_offered(tmp_path: Path) -> None:
    for offer in (SameHostOffer(directory=tmp_path / "missing"), SameHostOffer(enabled=False, directory=tmp_path)):
        with offer:
            assert offer.name == "" and not list(tmp_path.iterdir())


def _file_with(change: Callable[[GrowingFile], None]) -> int:
    """Returns a file as the publisher has it, then changed."""
    file, offset = GrowingFile(), 0
    for part in _words(0).values():
        file.write(memoryview(part).cast("B"), offset)
        offset += part.nbytes
    mapping = file.mapped(offset)
    change(file)
    return os.dup(mapping.descriptor)


DAMAGED: dict[str, Callable[[GrowingFile], None]] = {
    "one byte in the first tensor": lambda file: file.write(memoryview(b"?"), 1_000_000),
    "the last byte": lambda file: file.write(memoryview(b"?"), file.size_bytes - 1),
    "another version from the middle on": lambda file: file.write(memoryview(bytes(900_000)), 800_000),
    "truncated": lambda file: file.mapped(1_800_000) and None,
    "empty": lambda file: file.mapped(0) and None,
}


@pytest.mark.parametrize("change", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("threads", [0, 2])
def test_a_file_that_is_not_the_version_is_refused(change: Callable[[GrowingFile], None], threads: int) -> None:
    publisher = WeightPublisher(threads=0)
    _publish(publisher, 0)
    stream, buffers = publisher.open(weights_pb2.FetchWeightsRequest()), HostBuffers()
    descriptor = _file_with(change)
    assembler = WeightAssembler(
        LAYOUTS, stream.manifest.version, buffers=buffers, threads=threads, take_file=lambda: descriptor
    )
    with pytest.raises(RollwireError) as caught, assembler:
        for message in stream.handed_over():
            assembler.feed(message)
        assembler.result()
    os.close(descriptor)
    assert caught.value.reason == Reason.WEIGHTS_CORRUPT
    assert assembler.copied and buffers.taken == 0


def test_a_file_comes_once_in_its_place_and_only_where_it_was_offered() -> None:
    publisher = WeightPublisher(threads=0)
    _publish(publisher, 0)
    manifest, file, commit = publisher.open(weights_pb2.FetchWeightsRequest()).handed_over()
    chunk = list(publisher.open(weights_pb2.FetchWeightsRequest()))[1]
    short = weights_pb2.FetchWeightsResponse(file=weights_pb2.WeightFile(tensor_offsets=[0, 1])).SerializeToString()
    descriptor = _file_with(lambda file: None)
    for messages, take in (
        ([file], lambda: descriptor),
        ([manifest, file, file], lambda: descriptor),
        ([manifest, chunk, file], lambda: descriptor),
        ([manifest, file, chunk], lambda: descriptor),
        ([manifest, short], lambda: descriptor),
        ([manifest, file], None),
        ([manifest, commit], lambda: descriptor),
    ):
        with (
            pytest.raises(RollwireError) as caught,
            WeightAssembler(LAYOUTS, publisher.manifest.version, threads=0, take_file=take) as assembler,
        ):
            for message in messages:
                assembler.feed(message)
        assert caught.value.reason == Reason.WEIGHTS_CORRUPT
    os.close(descriptor)


def test_a_version_that_is_replaced_before_its_end_is_not_committed() -> None:
    publisher = WeightPublisher(threads=0)
    _publish(publisher, 0)
    messages = publisher.open(weights_pb2.FetchWeightsRequest()).handed_over()
    found = [next(messages), next(messages)]
    for step in (1, 2):
        _publish(publisher, step)
    with pytest.raises(RollwireError, match="line@0 was replaced"):
        found.append(next(messages))
