"""The publisher: what readers get is what was published, encoded once, in bounded memory."""

from __future__ import annotations

import os
import threading
import tracemalloc
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.rpc import weight_steps
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.weight_buffers import HostBuffers
from rollwire.rpc.weight_delta import compose, supported_encodings
from rollwire.rpc.weight_publisher import PublishedTensor, WeightPublisher, WeightStream
from rollwire.rpc.weight_stream import ELEMENT_BYTES, HeldWeights, TensorLayout, WeightAssembler, build_manifest
from rollwire.rpc.weight_stream import HostTensor as Host
from rollwire.v1 import weights_pb2

BF16, F32, I64 = weights_pb2.DATA_TYPE_BFLOAT16, weights_pb2.DATA_TYPE_FLOAT32, weights_pb2.DATA_TYPE_INT64
FULL, UNCHANGED = weights_pb2.TENSOR_ENCODING_FULL, weights_pb2.TENSOR_ENCODING_UNCHANGED
SPARSE, ZSTD = weights_pb2.TENSOR_ENCODING_SPARSE, weights_pb2.TENSOR_ENCODING_SPARSE_ZSTD
LAYOUTS = {
    "embed": TensorLayout(BF16, (40, 25)),
    "odd": TensorLayout(BF16, (3,)),
    "count": TensorLayout(I64, (1,)),
    "master": TensorLayout(F32, (301,)),
}
Words = dict[str, np.ndarray]


def _version(step: int) -> weights_pb2.WeightVersion:
    return weights_pb2.WeightVersion(lineage="lineage-a", step=step)


def _random(seed: int, layouts: Mapping[str, TensorLayout] = LAYOUTS) -> Words:
    generator = np.random.default_rng(seed)
    return {
        name: generator.integers(0, 256, layout.byte_size, dtype=np.uint8).view(f"<u{ELEMENT_BYTES[layout.dtype]}")
        for name, layout in layouts.items()
    }


def _changed(words: Words, share: float, seed: int = 0) -> Words:
    """Returns the words with about this share of them moved by one unit, at least one."""
    generator = np.random.default_rng(seed)
    after = {name: part.copy() for name, part in words.items()}
    for part in after.values():
        part[generator.integers(0, len(part), max(1, int(share * len(part))))] += 1
    return after


def _tensors(words: Words, layouts: Mapping[str, TensorLayout] = LAYOUTS) -> Iterator[PublishedTensor]:
    for name, part in words.items():
        yield name, layouts[name], [memoryview(part).cast("B")]


def _request(
    step: int | None = None, have: int | None = None, accepted: tuple[Any, ...] | None = None
) -> weights_pb2.FetchWeightsRequest:
    return weights_pb2.FetchWeightsRequest(
        version=_version(step) if step is not None else None,
        have=_version(have) if have is not None else None,
        accepted_encodings=supported_encodings() if accepted is None else accepted,
    )


def _receive(
    stream: WeightStream, base: HeldWeights | None = None, layouts: Mapping[str, TensorLayout] = LAYOUTS
) -> HeldWeights:
    with WeightAssembler(layouts, stream.manifest.version, base=base, threads=0) as assembler:
        for message in stream:
            assembler.feed(message)
        return assembler.result()


def _holds(held: HeldWeights, words: Words) -> bool:
    return {name: bytes(tensor.data) for name, tensor in held.tensors.items()} == {
        name: part.tobytes() for name, part in words.items()
    }


def _encodings(stream: WeightStream) -> set[Any]:
    return {spec.encoding for spec in stream.manifest.tensors}


def _refused(publisher: WeightPublisher, request: weights_pb2.FetchWeightsRequest) -> RollwireError:
    with pytest.raises(RollwireError) as caught:
        publisher.open(request)
    return caught.value


@given(
    shares=st.lists(st.sampled_from([0.0, 0.01, 0.1, 1.0]), min_size=1, max_size=5),
    chunk_bytes=st.integers(16, 400),
    threads=st.sampled_from([0, 2]),
    kept_bases=st.integers(1, 4),
    delta_share=st.sampled_from([0.1, 10.0]),
)
@settings(max_examples=60, deadline=None)
def test_every_reader_gets_exactly_the_present_version(
    shares: list[float], chunk_bytes: int, threads: int, kept_bases: int, delta_share: float
) -> None:
    publisher = WeightPublisher(
        kept_bases=kept_bases, delta_share=delta_share, threads=threads, chunk_bytes=chunk_bytes
    )
    words = _random(0)
    readers: list[HeldWeights] = []
    for step, share in enumerate([0.0, *shares]):
        words = _changed(words, share, seed=step)
        manifest = publisher.publish(_version(step), _tensors(words))
        assert manifest == build_manifest(
            _version(step),
            {
                name: Host(layout.dtype, layout.shape, memoryview(words[name]).cast("B"))
                for name, layout in LAYOUTS.items()
            },
        )
        full = _receive(publisher.open(_request(step)))
        assert _holds(full, words)
        for held in readers:
            assert _holds(_receive(publisher.open(_request(have=held.version.step)), held), words)
        readers.append(full)


def test_pieces_may_be_cut_anywhere_between_elements_and_their_memory_used_again() -> None:
    words = _random(0)
    shared = bytearray(64)

    def pieces(part: np.ndarray) -> Iterator[memoryview]:
        whole = memoryview(part).cast("B")
        for start in range(0, whole.nbytes, 56):
            piece = whole[start : start + 56]
            shared[: piece.nbytes] = piece
            yield memoryview(shared)[: piece.nbytes]

    for chunk_bytes in (50, 57, 1000, 1 << 20):
        publisher = WeightPublisher(chunk_bytes=chunk_bytes, threads=0)
        publisher.publish(_version(0), ((name, LAYOUTS[name], pieces(part)) for name, part in words.items()))
        assert _holds(_receive(publisher.open(_request())), words)


def test_a_small_change_is_sent_sparse_and_unchanged_tensors_not_at_all() -> None:
    publisher = WeightPublisher(threads=0)
    words = _random(0)
    publisher.publish(_version(0), _tensors(words))
    held = _receive(publisher.open(_request()))
    after = words | {"embed": words["embed"].copy()}
    after["embed"][100] += 1
    publisher.publish(_version(1), _tensors(after))
    stream = publisher.open(_request(1, have=0))
    specs = {spec.name: spec for spec in stream.manifest.tensors}
    assert specs["embed"].encoding in (SPARSE, ZSTD) and specs["embed"].changed_elements == 1
    assert {spec.encoding for name, spec in specs.items() if name != "embed"} == {UNCHANGED}
    assert stream.manifest.payload_bytes < 50
    assert _holds(_receive(stream, held), after)


@pytest.mark.parametrize(
    ("have", "accepted"),
    [(None, None), (0, ()), (0, (FULL,)), (0, (UNCHANGED,)), (0, (SPARSE, ZSTD)), (7, None)],
    ids=["nothing held", "accepts nothing", "accepts full", "no sparse", "no unchanged", "unknown base"],
)
def test_everything_is_sent_when_a_delta_is_not_possible(have: int | None, accepted: tuple[Any, ...] | None) -> None:
    publisher = WeightPublisher(threads=0)
    words = _random(0)
    publisher.publish(_version(0), _tensors(words))
    publisher.publish(_version(1), _tensors(_changed(words, 0.01)))
    stream = publisher.open(_request(1, have, accepted))
    assert not stream.manifest.HasField("base") and _encodings(stream) == {FULL}
    assert _holds(_receive(stream), _changed(words, 0.01))


def test_a_reader_without_zstd_gets_plain_payloads() -> None:
    layouts = {"large": TensorLayout(BF16, (20_000,))}
    publisher = WeightPublisher(threads=0)
    words = _random(0, layouts)
    publisher.publish(_version(0), _tensors(words, layouts))
    held = _receive(publisher.open(_request()), layouts=layouts)
    after = _changed(words, 0.05)
    publisher.publish(_version(1), _tensors(after, layouts))
    assert _encodings(publisher.open(_request(1, 0))) == {ZSTD}
    stream = publisher.open(_request(1, 0, (UNCHANGED, SPARSE)))
    assert _encodings(stream) == {SPARSE}
    assert _holds(_receive(stream, held, layouts), after)


def test_a_change_that_does_not_pay_is_sent_in_full_and_ends_the_chain() -> None:
    publisher = WeightPublisher(threads=0, delta_share=0.01)
    words = _random(0)
    publisher.publish(_version(0), _tensors(words))
    publisher.publish(_version(1), _tensors(_changed(words, 0.5)))
    assert publisher.delta_bytes == 0
    assert not publisher.open(_request(1, have=0)).manifest.HasField("base")


def test_the_oldest_bases_are_forgotten_first() -> None:
    publisher = WeightPublisher(threads=0, kept_bases=2, delta_share=10)
    words = _random(0)
    for step in range(5):
        publisher.publish(_version(step), _tensors(words))
        words = _changed(words, 0.01, seed=step)
    relative = {have: publisher.open(_request(4, have)).manifest.HasField("base") for have in range(5)}
    assert relative == {0: False, 1: False, 2: True, 3: True, 4: True}


def test_memory_for_changes_is_bounded_and_old_bases_make_room() -> None:
    layouts = {"large": TensorLayout(BF16, (100_000,))}
    publisher = WeightPublisher(threads=0, kept_bases=100, delta_share=0.03)
    words = _random(0, layouts)
    for step in range(12):
        publisher.publish(_version(step), _tensors(words, layouts))
        assert publisher.delta_bytes <= 0.03 * 200_000
        words = _changed(words, 0.01, seed=step)
    newest_first = [publisher.open(_request(11, have)).manifest.HasField("base") for have in range(10, -1, -1)]
    assert newest_first[0] and not newest_first[-1]
    assert newest_first == sorted(newest_first, reverse=True)
    assert publisher.delta_bytes <= 0.03 * 200_000


def test_a_reader_that_has_the_version_gets_an_empty_stream() -> None:
    publisher = WeightPublisher(threads=0)
    words = _random(0)
    publisher.publish(_version(0), _tensors(words))
    held = _receive(publisher.open(_request()))
    stream = publisher.open(_request(have=0))
    assert stream.manifest.payload_bytes == 0
    assert _holds(_receive(stream, held), words)


def test_other_tensors_end_the_chain() -> None:
    words = _random(0)
    for layouts in (
        {name: LAYOUTS[name] for name in ("embed", "odd", "count")},
        {name: LAYOUTS[name] for name in ("odd", "embed", "count", "master")},
        LAYOUTS | {"new": TensorLayout(BF16, (5,))},
        LAYOUTS | {"count": TensorLayout(I64, (2,))},
    ):
        publisher = WeightPublisher(threads=0, chunk_bytes=64, delta_share=10)
        publisher.publish(_version(0), _tensors(words))
        other = _random(1, layouts)
        publisher.publish(_version(1), _tensors(other, layouts))
        stream = publisher.open(_request(1, have=0))
        assert not stream.manifest.HasField("base")
        assert _holds(_receive(stream, layouts=layouts), other)


def test_unknown_versions_are_refused() -> None:
    publisher = WeightPublisher(threads=0)
    assert publisher.manifest is None
    assert _refused(publisher, _request()).reason == Reason.UNKNOWN_VERSION
    publisher.publish(_version(3), _tensors(_random(0)))
    error = _refused(publisher, _request(2, have=1))
    assert error.reason == Reason.UNKNOWN_VERSION
    assert "lineage-a@2 is not held; the present one is lineage-a@3" in error.message


def test_while_a_version_is_published_readers_are_told_to_come_again() -> None:
    publisher = WeightPublisher(threads=0)
    words = _random(0)
    publisher.publish(_version(0), _tensors(words))

    def tensors() -> Iterator[PublishedTensor]:
        for request in (_request(), _request(1), _request(1, have=0)):
            error = _refused(publisher, request)
            assert error.reason == Reason.WEIGHT_SOURCE_UNAVAILABLE and error.retry_after_s == 1.0
        assert _refused(publisher, _request(0)).reason == Reason.UNKNOWN_VERSION
        assert publisher.manifest is not None and publisher.manifest.version == _version(0)
        yield from _tensors(words)

    publisher.publish(_version(1), tensors())
    assert _holds(_receive(publisher.open(_request(1))), words)


@pytest.mark.parametrize("threads", [0, 2])
def test_a_publication_that_fails_can_be_repeated(threads: int) -> None:
    layouts = {"large": TensorLayout(BF16, (500_000,)), "last": TensorLayout(BF16, (10,))}
    publisher = WeightPublisher(threads=threads, chunk_bytes=1 << 14)
    words = _random(0, layouts)
    publisher.publish(_version(0), _tensors(words, layouts))

    def broken() -> Iterator[PublishedTensor]:
        yield "large", layouts["large"], [memoryview(words["large"]).cast("B")]
        raise ConnectionError("a rank died")

    with pytest.raises(ConnectionError):
        publisher.publish(_version(1), broken())
    assert publisher.manifest is None
    assert _refused(publisher, _request()).reason == Reason.UNKNOWN_VERSION
    publisher.publish(_version(1), _tensors(words, layouts))
    assert _holds(_receive(publisher.open(_request(1, have=0)), layouts=layouts), words)


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [((10,), [18]), ((10,), [22]), ((10,), [20, 2]), ((10,), [19, 1]), ((10,), [])],
)
def test_pieces_of_another_size_are_refused(layout: tuple[int, ...], sizes: list[int]) -> None:
    pieces = [memoryview(bytes(size)) for size in sizes]
    with pytest.raises(ValueError, match="tensor t"):
        WeightPublisher(threads=0).publish(_version(0), [("t", TensorLayout(BF16, layout), pieces)])


def test_a_tensor_that_occurs_twice_is_refused() -> None:
    tensors = [*_tensors(_random(0)), *_tensors(_random(0))]
    with pytest.raises(ValueError, match="embed occurs twice"):
        WeightPublisher(threads=0).publish(_version(0), tensors)


def test_a_stream_survives_the_next_version_and_is_cut_by_the_one_after() -> None:
    publisher = WeightPublisher(threads=0, chunk_bytes=64)
    words = _random(0)
    publisher.publish(_version(0), _tensors(words))
    lasting, slow = publisher.open(_request()), publisher.open(_request())
    messages, assembler = iter(slow), WeightAssembler(LAYOUTS, _version(0), threads=0)
    for _ in range(5):
        assembler.feed(next(messages))
    publisher.publish(_version(1), _tensors(_changed(words, 0.1)))
    assert _holds(_receive(lasting), words)
    publisher.publish(_version(2), _tensors(_changed(words, 0.2)))
    with pytest.raises(RollwireError, match="replaced while") as caught:
        for message in messages:
            assembler.feed(message)
    assert caught.value.reason == Reason.UNKNOWN_VERSION


def test_readers_beside_publications_get_whole_versions_or_errors() -> None:
    """Each version is written over the one before while streams of that one are being sent."""
    layouts = {"large": TensorLayout(BF16, (400_000,)), "small": TensorLayout(BF16, (100,))}
    publisher = WeightPublisher(threads=1, chunk_bytes=1 << 15)
    words = _random(0, layouts)
    publisher.publish(_version(0), _tensors(words, layouts))
    stop, whole = threading.Event(), threading.Semaphore(0)

    def read() -> None:
        while not stop.is_set():
            try:
                held = _receive(publisher.open(_request()), layouts=layouts)
            except RollwireError as error:
                assert error.reason in (Reason.UNKNOWN_VERSION, Reason.WEIGHT_SOURCE_UNAVAILABLE)
            else:  # every digest agreed
                assert held.version.step <= 40
                whole.release()

    with ThreadPoolExecutor(3) as readers:
        reading = [readers.submit(read) for _ in range(3)]
        for step in range(1, 41):
            words = _changed(words, 0.9, seed=step)
            publisher.publish(_version(step), _tensors(words, layouts))
            if step % 4 == 0:
                assert whole.acquire(timeout=30)
        stop.set()
        for future in reading:
            future.result(timeout=30)


def test_present_tensors_can_be_copied_while_the_next_version_is_published() -> None:
    publisher = WeightPublisher(threads=0, chunk_bytes=64)
    with pytest.raises(RollwireError):
        publisher.tensors()
    words = _random(0)
    publisher.publish(_version(0), _tensors(words))
    copies = publisher.tensors()
    found = [next(copies)]
    publisher.publish(_version(1), _tensors(_changed(words, 0.5)))
    found += copies
    assert {name: bytes(tensor.data) for name, tensor in found} == {
        name: part.tobytes() for name, part in words.items()
    }
    assert {name: TensorLayout(tensor.dtype, tensor.shape) for name, tensor in found} == LAYOUTS


def test_many_readers_share_one_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[int] = []

    def counted(changes: Any, *arguments: Any) -> Any:
        composed.append(len(changes))
        return compose(changes, *arguments)

    monkeypatch.setattr(weight_steps, "compose", counted)
    publisher = WeightPublisher(threads=0, delta_share=1)
    layouts = {"large": TensorLayout(BF16, (200_000,))}
    words = _random(0, layouts)
    for step in range(4):
        publisher.publish(_version(step), _tensors(words, layouts))
        words = _changed(words, 0.02, seed=step)
    together = threading.Barrier(16)

    def read(have: int | None) -> tuple[int | None, int]:
        together.wait()
        stream = publisher.open(_request(3, have))
        return have, id(stream.queue.chunks()[0].data.obj)

    with ThreadPoolExecutor(16) as readers:
        found = list(readers.map(read, [None, 0, 1, 2] * 4))
    assert len(set(found)) == 4
    assert len(composed) == 2  # for the bases 0 and 1, once each


def _peak_bytes(work: Any) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_publishing_takes_at_most_a_fifth_more_than_the_model() -> None:
    layouts = {f"layer.{at}": TensorLayout(BF16, (2 << 20,)) for at in range(24)}  # 96 MiB
    layouts["embed"] = TensorLayout(BF16, (8 << 20,))  # 16 MiB more
    model_bytes = sum(layout.byte_size for layout in layouts.values())
    generator = np.random.default_rng(0)
    master = generator.integers(0, 1 << 16, 2 << 20).astype("<u2")

    def tensors(step: int) -> Iterator[PublishedTensor]:
        """Serves every tensor from one small array, rolled: the model itself must not count."""
        for name, layout in layouts.items():
            pieces = (memoryview(np.roll(master, at + 1)).cast("B") for at in range(layout.elements // len(master)))
            yield name, layout, pieces
        master[generator.integers(0, len(master), len(master) // 50)] += 1

    def work() -> None:
        for step in range(4):
            publisher.publish(_version(step), tensors(step))
        assert publisher.open(_request(3, have=0)).manifest.HasField("base")
        readers = [iter(publisher.open(_request())) for _ in range(16)]
        for _ in range(20):
            for reader in readers:
                next(reader)

    publisher = WeightPublisher(threads=2)
    peak_bytes = _peak_bytes(work)  # what lies in the file does not count here
    shared = publisher.open(_request()).shared
    assert shared is not None and os.fstat(shared.file.descriptor).st_size == model_bytes
    assert peak_bytes <= 0.2 * model_bytes


def test_readers_that_alternate_two_buffers_follow_every_version() -> None:
    publisher = WeightPublisher(threads=2)
    layouts = {"large": TensorLayout(BF16, (300_000,)), "small": TensorLayout(F32, (10,))}
    buffers, held, words = HostBuffers(), None, _random(0, layouts)
    for step in range(6):
        publisher.publish(_version(step), _tensors(words, layouts))
        stream = publisher.open(_request(step, have=step - 1 if held else None))
        assembler = WeightAssembler(layouts, _version(step), base=held, buffers=buffers, threads=2)
        for message in stream:
            assembler.feed(message)
        after = assembler.result()
        assert _holds(after, words)
        if held is not None:
            held.release()
        held, words = after, _changed(words, 0.01, seed=step)
    assert buffers.taken == 1
