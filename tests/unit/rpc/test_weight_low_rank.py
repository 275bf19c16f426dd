"""Adapters on the wire: both sides merge to the same bits, and nothing else than those bits is ever used."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rollwire.learner.lora import Adapter, merged_rows, unsigned_zeros
from rollwire.rpc.digests import tensor_digest
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.weight_delta import supported_encodings
from rollwire.rpc.weight_low_rank import LowRank, LowRankBases, merge_low_rank
from rollwire.rpc.weight_publisher import WeightPublisher, WeightStream
from rollwire.rpc.weight_relay import WeightRelay
from rollwire.rpc.weight_stream import HeldWeights, TensorLayout, WeightAssembler
from rollwire.v1 import weights_pb2

BF16, F16, F32 = weights_pb2.DATA_TYPE_BFLOAT16, weights_pb2.DATA_TYPE_FLOAT16, weights_pb2.DATA_TYPE_FLOAT32
TYPES: dict[Any, torch.dtype] = {BF16: torch.bfloat16, F16: torch.float16, F32: torch.float32}
FULL, UNCHANGED = weights_pb2.TENSOR_ENCODING_FULL, weights_pb2.TENSOR_ENCODING_UNCHANGED
LOW_RANK = weights_pb2.TENSOR_ENCODING_LOW_RANK
ROWS, COLUMNS, RANK = 300, 400, 2


def raw(tensor: torch.Tensor, dtype: Any) -> bytes:
    return bytes(tensor.detach().to(TYPES[dtype]).contiguous().reshape(-1).view(torch.uint8).numpy())


class Model:
    """A matrix with an adapter that changes nothing at step 0, and one that is frozen."""

    def __init__(self, dtype: Any, seed: int = 0, amount: float = 0.1) -> None:
        self.dtype, self.amount = dtype, amount
        generator = torch.Generator().manual_seed(seed)
        self.base = torch.randn(ROWS, COLUMNS, generator=generator).to(TYPES[dtype]).float()
        self.base[0, :20] = -0.0
        self.base[1, :20] = 1e-42
        self.frozen = torch.randn(500, generator=generator)
        self.layouts = {"frozen": TensorLayout(dtype, (500,)), "adapted": TensorLayout(dtype, (ROWS, COLUMNS))}

    def tensors(self, step: int) -> dict[str, bytes]:
        merged = merged_rows(self.base, self.adapter(step), 0, ROWS)
        return {"frozen": raw(self.frozen, self.dtype), "adapted": raw(merged, self.dtype)}

    def adapter(self, step: int) -> Adapter:
        generator = torch.Generator().manual_seed(9)
        down = torch.randn(RANK, COLUMNS, generator=generator)
        up = torch.randn(ROWS, RANK, generator=torch.Generator().manual_seed(step)) * self.amount
        return Adapter(down, up if step else torch.zeros(ROWS, RANK), 1.7)

    def low_rank(self, step: int) -> LowRank:
        adapter = self.adapter(step)
        payload = adapter.down.numpy().tobytes() + (adapter.up * adapter.scale).numpy().tobytes()
        return LowRank(tensor_digest(raw(unsigned_zeros(self.base), self.dtype)), RANK, payload)

    def publish(self, publisher: WeightPublisher, step: int) -> None:
        parts = self.tensors(step)
        publisher.publish(
            version(step),
            ((name, layout, [memoryview(parts[name])]) for name, layout in self.layouts.items()),
            {"adapted": self.low_rank(step)},
        )


class Reader:
    """Follows sources and keeps what adapters are added to."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.bases = LowRankBases()
        self.held: HeldWeights | None = None
        self.relay = WeightRelay()
        self.encodings: list[int] = []
        self.received_bytes = 0

    def open(self, source: WeightPublisher | WeightRelay, step: int) -> WeightStream:
        return source.open(
            weights_pb2.FetchWeightsRequest(
                version=version(step),
                have=self.held.version if self.held is not None else None,
                accepted_encodings=supported_encodings(),
                low_rank_bases=self.bases.digest,
            )
        )

    def receive(self, messages: Iterator[bytes] | list[bytes], step: int) -> None:
        with WeightAssembler(
            self.model.layouts,
            version(step),
            base=self.held,
            threads=0,
            keep_changes=True,
            low_rank_bases=self.bases,
        ) as assembler:
            for message in messages:
                assembler.feed(message)
            self.held = assembler.result()
        self.received_bytes = assembler.received_bytes
        self.relay.hold(self.held)
        assert content(self.held) == self.model.tensors(step)

    def follow(self, source: WeightPublisher | WeightRelay, step: int) -> None:
        stream = self.open(source, step)
        self.encodings = [spec.encoding for spec in stream.manifest.tensors]
        self.receive(iter(stream), step)


def version(step: int) -> weights_pb2.WeightVersion:
    return weights_pb2.WeightVersion(lineage="line", step=step)


def content(held: HeldWeights) -> dict[str, bytes]:
    return {name: bytes(tensor.data) for name, tensor in held.tensors.items()}


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (37, 53, 5), (3, 70_000, 2), (700, 300, 16)])
def test_both_sides_merge_to_the_same_bits(dtype: Any, shape: tuple[int, int, int]) -> None:
    rows, columns, rank = shape
    generator = torch.Generator().manual_seed(rows)
    base = torch.randn(rows, columns, generator=generator).to(TYPES[dtype])
    base.view(-1)[::3] *= 1e-39  # subnormal in float32 and bfloat16
    adapter = Adapter(
        torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator), 1.7
    )
    adapter.up[1::2] *= 1e-20
    payload = adapter.down.numpy().tobytes() + (adapter.up * adapter.scale).numpy().tobytes()
    target = memoryview(bytearray(base.numel() * base.element_size()))
    kept = raw(unsigned_zeros(base), dtype)

    merge_low_rank(target, kept, TensorLayout(dtype, (rows, columns)), LowRank(b"", rank, payload))

    assert bytes(target) == raw(merged_rows(base, adapter, 0, rows), dtype) != kept


def test_rounding_to_bfloat16_is_that_of_torch_at_every_tie_and_edge() -> None:
    high = np.arange(1 << 16, dtype="<u4") << np.uint32(16)
    words = np.concatenate([high | np.uint32(low) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = words.view("<f4")
    values = values[~np.isnan(values)]
    target = memoryview(bytearray(2 * len(values)))
    zeros = bytes(2 * len(values))
    payload = values.tobytes() + np.ones(1, "<f4").tobytes()

    merge_low_rank(target, zeros, TensorLayout(BF16, (1, len(values))), LowRank(b"", 1, payload))

    assert bytes(target) == raw(torch.from_numpy(values + np.float32(0)), BF16)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_updates_are_adapters_and_leave_what_full_ones_leave(dtype: Any) -> None:
    model, publisher = Model(dtype), WeightPublisher(threads=0)
    reader, whole = Reader(model), None
    for step in range(5):
        model.publish(publisher, step)
        if step == 3:
            continue  # a reader may skip one
        reader.follow(publisher, step)
        if step:
            assert reader.encodings == [UNCHANGED, LOW_RANK]
            assert reader.received_bytes == 4 * RANK * (ROWS + COLUMNS)
        whole = Reader(model)
        whole.follow(publisher, step)
        assert reader.held.digest == whole.held.digest == publisher.manifest.digest
        assert reader.held.tensor_digests == whole.held.tensor_digests
        assert reader.held.manifest() == whole.held.manifest()
    assert whole.encodings == [FULL, FULL] and whole.bases.digest != reader.bases.digest


def test_a_change_that_is_smaller_than_the_adapter_travels_as_elements() -> None:
    model, publisher = Model(BF16, amount=1e-5), WeightPublisher(threads=0, delta_share=1)
    reader = Reader(model)
    for step in range(2):
        model.publish(publisher, step)
        reader.follow(publisher, step)
    assert reader.encodings[1] in (weights_pb2.TENSOR_ENCODING_SPARSE, weights_pb2.TENSOR_ENCODING_SPARSE_ZSTD)
    assert reader.received_bytes < 4 * RANK * (ROWS + COLUMNS)


def test_frozen_tensors_stay_unchanged_for_readers_without_bases_and_without_memory_for_changes() -> None:
    model, publisher = Model(F32), WeightPublisher(threads=0, delta_share=0)
    reader = Reader(model)
    for step in range(3):
        model.publish(publisher, step)
        reader.bases = LowRankBases()
        reader.follow(publisher, step)
    assert reader.encodings == [UNCHANGED, FULL] and publisher.delta_bytes == 0


def test_a_reader_of_other_bases_gets_everything_and_learns_new_ones() -> None:
    model, other = Model(F32), Model(F32, seed=1)
    publisher = WeightPublisher(threads=0)
    model.publish(publisher, 0)
    reader = Reader(model)
    reader.follow(publisher, 0)
    before = reader.bases.digest
    reader.model = other
    publisher = WeightPublisher(threads=0)
    other.publish(publisher, 0)
    other.publish(publisher, 1)
    reader.held = None
    reader.follow(publisher, 1)
    assert reader.encodings == [FULL, FULL] and reader.bases.digest == b"" != before
    other.publish(publisher, 0)
    reader.follow(publisher, 0)
    other.publish(publisher, 1)
    reader.follow(publisher, 1)
    assert reader.encodings == [UNCHANGED, LOW_RANK]


def test_a_relay_passes_adapters_on_as_they_came() -> None:
    model, publisher = Model(F32), WeightPublisher(threads=0)
    first, second, third = Reader(model), Reader(model), Reader(model)
    for step in range(3):
        model.publish(publisher, step)
        first.follow(publisher, step)
        second.follow(first.relay, step)
        third.follow(second.relay, step)
    assert third.encodings == [UNCHANGED, LOW_RANK] and third.received_bytes == first.received_bytes


def _damaged(reader: Reader, publisher: WeightPublisher, fault: Any) -> RollwireError:
    """Returns the error of a stream with a fault; asserts that it left everything as it was."""
    before, bases = content(reader.held), reader.bases.digest
    response = weights_pb2.FetchWeightsResponse
    messages = [response.FromString(message) for message in reader.open(publisher, 1)]
    fault(messages)
    with pytest.raises(RollwireError) as caught:
        reader.receive([message.SerializeToString() for message in messages], 1)
    assert content(reader.held) == before and reader.bases.digest == bases
    return caught.value


def _set_spec(**fields: Any) -> Any:
    def fault(messages: Any) -> None:
        for name, value in fields.items():
            setattr(messages[0].manifest.tensors[1], name, value)

    return fault


def _flip(messages: Any) -> None:
    """Changes one value of A, with a checksum that matches."""
    chunk = messages[1].chunk
    data = np.frombuffer(chunk.data, "<f4").copy()
    data[3] += 1
    chunk.data = data.tobytes()
    chunk.crc32 = zlib.crc32(chunk.data)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_flip, "the digest of tensor adapted differs"),
        (_set_spec(low_rank_base_digest=bytes(32)), "which are not kept here; fetch the whole version"),
        (_set_spec(low_rank_base_digest=b""), "do not fit together"),
        (_set_spec(low_rank_base_digest=b"short"), "do not fit together"),
        (_set_spec(low_rank=RANK + 1), "do not fit together"),
        (_set_spec(low_rank=0), "do not fit together"),
        (_set_spec(changed_elements=1), "do not fit together"),
        (_set_spec(sparse_bytes=1), "do not fit together"),
        (_set_spec(low_rank=1 << 31), "do not fit together"),
        (_set_spec(encoding=FULL), "do not fit together"),
        (lambda messages: messages[0].manifest.ClearField("base"), "has the digest of a base but no base"),
    ],
)
def test_a_damaged_update_is_refused_and_the_whole_version_then_fits(fault: Any, message: str) -> None:
    model, publisher = Model(F32), WeightPublisher(threads=0)
    reader = Reader(model)
    model.publish(publisher, 0)
    reader.follow(publisher, 0)
    model.publish(publisher, 1)
    error = _damaged(reader, publisher, fault)
    assert error.reason == Reason.WEIGHTS_CORRUPT and message in error.message
    reader.held = None
    reader.follow(publisher, 1)
    assert reader.encodings == [FULL, FULL]
    model.publish(publisher, 2)
    reader.follow(publisher, 2)
    assert reader.encodings == [UNCHANGED, LOW_RANK]  # what was kept is still there
