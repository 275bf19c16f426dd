"""Passing on: a reader at a relay gets what one at the publisher gets, and never parts of two versions."""

from __future__ import annotations

import numpy as np
import pytest

from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.weight_buffers import HostBuffers
from rollwire.rpc.weight_delta import supported_encodings
from rollwire.rpc.weight_publisher import WeightPublisher
from rollwire.rpc.weight_relay import WeightRelay
from rollwire.rpc.weight_stream import HeldWeights, TensorLayout, WeightAssembler
from rollwire.v1 import weights_pb2

BF16 = weights_pb2.DATA_TYPE_BFLOAT16
FULL, UNCHANGED = weights_pb2.TENSOR_ENCODING_FULL, weights_pb2.TENSOR_ENCODING_UNCHANGED
SPARSE, ZSTD = weights_pb2.TENSOR_ENCODING_SPARSE, weights_pb2.TENSOR_ENCODING_SPARSE_ZSTD
LAYOUTS = {
    "large": TensorLayout(BF16, (2000, 1100)),
    "same": TensorLayout(BF16, (70,)),
    "redone": TensorLayout(BF16, (300,)),
}
Words = dict[str, np.ndarray]


def _version(step: int) -> weights_pb2.WeightVersion:
    return weights_pb2.WeightVersion(lineage="line", step=step)


def _request(have: int | None = None, *, compressed: bool = True, **fields: object) -> weights_pb2.FetchWeightsRequest:
    accepted = [encoding for encoding in supported_encodings() if compressed or encoding != ZSTD]
    base = _version(have) if have is not None else None
    return weights_pb2.FetchWeightsRequest(have=base, accepted_encodings=accepted, **fields)


def _words(step: int) -> Words:
    """Weights of a step: a percent of `large` and all of `redone` change in each."""
    words = {
        name: np.random.default_rng(0).integers(0, 1 << 16, layout.elements).astype("<u2")
        for name, layout in LAYOUTS.items()
    }
    for at in range(1, step + 1):
        words["large"][at::100] += 1
        words["redone"] = np.random.default_rng(at).integers(0, 1 << 16, 300).astype("<u2")
    return words


def _publish(publisher: WeightPublisher, step: int) -> None:
    publisher.publish(
        _version(step), ((name, LAYOUTS[name], [memoryview(part).cast("B")]) for name, part in _words(step).items())
    )


class Reader:
    """Follows a source and passes on what it has."""

    def __init__(self) -> None:
        self.relay = WeightRelay()
        self.held: HeldWeights | None = None
        self.received_bytes = 0
        self.encodings: set[int] = set()
        self._buffers = HostBuffers()

    def follow(self, source: WeightPublisher | WeightRelay, step: int, *, compressed: bool = True) -> None:
        request = _request(self.held.version.step if self.held else None, compressed=compressed, version=_version(step))
        stream = source.open(request)
        self.encodings = {spec.encoding for spec in stream.manifest.tensors}
        with WeightAssembler(
            LAYOUTS, _version(step), base=self.held, buffers=self._buffers, threads=0, keep_changes=True
        ) as assembler:
            for message in stream:
                assembler.feed(message)
            held = assembler.result()
        self.received_bytes = assembler.received_bytes
        before, self.held = self.held, held
        self.relay.hold(held)
        if before is not None:
            before.release()
        assert {name: bytes(tensor.data) for name, tensor in held.tensors.items()} == {
            name: part.tobytes() for name, part in _words(step).items()
        }


@pytest.mark.parametrize("compressed", [True, False])
def test_changes_are_passed_on_as_they_came(compressed: bool) -> None:
    publisher, first, second, third = WeightPublisher(threads=0), Reader(), Reader(), Reader()
    for step in range(4):
        _publish(publisher, step)
        first.follow(publisher, step)
        second.follow(first.relay, step, compressed=compressed)
        third.follow(second.relay, step)  # through two servers
        assert first.held.digest == second.held.digest == third.held.digest == publisher.manifest.digest
        if step:
            sparse = ZSTD if compressed and ZSTD in supported_encodings() else SPARSE
            assert second.encodings == {sparse, UNCHANGED, FULL}
            assert second.received_bytes < 0.05 * publisher.manifest.payload_bytes
            assert first.received_bytes == third.received_bytes or not compressed


def test_a_reader_with_another_base_gets_everything_and_one_with_the_version_nothing() -> None:
    publisher, first, late = WeightPublisher(threads=0), Reader(), Reader()
    for step in range(3):
        _publish(publisher, step)
        first.follow(publisher, step)
        if step == 0:
            late.follow(first.relay, 0)
    late.follow(first.relay, 2)
    assert late.encodings == {FULL} and late.received_bytes == publisher.manifest.payload_bytes
    late.follow(first.relay, 2)
    assert late.encodings == {UNCHANGED} and late.received_bytes == 0
    assert {spec.encoding for spec in first.relay.open(weights_pb2.FetchWeightsRequest()).manifest.tensors} == {FULL}


def test_changes_that_are_too_large_to_keep_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollwire.rpc.weight_assembler.KEPT_CHANGES", 0.0)
    publisher, first, second = WeightPublisher(threads=0), Reader(), Reader()
    for step in range(2):
        _publish(publisher, step)
        first.follow(publisher, step)
        second.follow(first.relay, step)
    assert first.held.step is None and second.encodings == {FULL}


def test_versions_that_are_not_held_are_refused() -> None:
    publisher, reader = WeightPublisher(threads=0), Reader()
    with pytest.raises(RollwireError) as caught:
        reader.relay.open(_request())
    assert caught.value.reason == Reason.UNKNOWN_VERSION
    _publish(publisher, 0)
    reader.follow(publisher, 0)
    with pytest.raises(RollwireError, match="the present one is line@0") as caught:
        reader.relay.open(_request(version=_version(1)))
    assert caught.value.reason == Reason.UNKNOWN_VERSION


@pytest.mark.parametrize("have", [None, 0])
def test_a_stream_ends_without_commit_when_its_version_is_replaced(have: int | None) -> None:
    publisher, reader = WeightPublisher(threads=0), Reader()
    for step in range(2):
        _publish(publisher, step)
        reader.follow(publisher, step)
    messages = iter(reader.relay.open(_request(have)))
    next(messages)  # the manifest
    if have is None:
        next(messages)
    _publish(publisher, 2)
    reader.follow(publisher, 2)
    rest = []
    with pytest.raises(RollwireError, match="line@1 was replaced") as caught:
        rest.extend(messages)
    assert caught.value.reason == Reason.UNKNOWN_VERSION
    assert not [m for m in rest if weights_pb2.FetchWeightsResponse.FromString(m).HasField("commit")]
