"""The weight stream: what is sent arrives, and nothing damaged is ever accepted (I3)."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.weight_stream import HostTensor, TensorLayout, WeightAssembler, build_manifest, stream_messages
from rollwire.v1 import weights_pb2

VERSION = weights_pb2.WeightVersion(lineage="lineage-a", step=7)
FLOAT32 = weights_pb2.DATA_TYPE_FLOAT32


def _tensors(sizes: dict[str, tuple[int, ...]]) -> dict[str, HostTensor]:
    generator = np.random.default_rng(0)
    return {
        name: HostTensor(FLOAT32, shape, memoryview(generator.random(shape, dtype=np.float32)).cast("B"))
        for name, shape in sizes.items()
    }


SIZES = {"embed.weight": (5, 3), "norm.weight": (7,), "scalar": (1, 1, 1)}
TENSORS = _tensors(SIZES)
LAYOUTS = {name: TensorLayout(FLOAT32, shape) for name, shape in SIZES.items()}


def _messages(chunk_bytes: int = 16) -> list[weights_pb2.FetchWeightsResponse]:
    manifest = build_manifest(VERSION, TENSORS)
    return list(stream_messages(manifest, [tensor.data for tensor in TENSORS.values()], chunk_bytes))


def _receive(messages: list[weights_pb2.FetchWeightsResponse]) -> dict[str, HostTensor]:
    assembler = WeightAssembler(LAYOUTS, VERSION)
    for message in messages:
        assembler.feed(message)
    return assembler.tensors()


@given(
    sizes=st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1),
    chunk_bytes=st.integers(1, 200),
)
@settings(max_examples=200, deadline=None)
def test_any_set_of_tensors_arrives_bit_for_bit(sizes: dict[str, tuple[int, int]], chunk_bytes: int) -> None:
    sent = _tensors(sizes)
    manifest = build_manifest(VERSION, sent)
    assembler = WeightAssembler({name: TensorLayout(FLOAT32, shape) for name, shape in sizes.items()}, VERSION)
    for message in stream_messages(manifest, [tensor.data for tensor in sent.values()], chunk_bytes):
        assembler.feed(message)
    assert assembler.tensors() == sent
    assert assembler.digest == manifest.digest


def test_digest_is_the_documented_formula() -> None:
    plain = hashlib.sha256()
    for name in sorted(TENSORS, key=str.encode):
        plain.update(name.encode() + b"\0" + blake3(TENSORS[name].data).digest())
    assert build_manifest(VERSION, TENSORS).digest == plain.digest()


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_flipped_bit_anywhere_in_the_payload_is_refused(data: st.DataObject) -> None:
    messages = _messages()
    chunks = [message.chunk for message in messages if message.HasField("chunk")]
    chunk = data.draw(st.sampled_from(chunks))
    damaged = bytearray(chunk.data)
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    chunk.data = bytes(damaged)
    with pytest.raises(RollwireError) as caught:
        _receive(messages)
    assert caught.value.reason == Reason.WEIGHTS_CORRUPT


def test_damage_with_a_matching_checksum_is_caught_by_the_tensor_digest() -> None:
    import zlib

    messages = _messages()
    chunk = messages[1].chunk
    chunk.data = bytes(len(chunk.data))
    chunk.crc32 = zlib.crc32(chunk.data)
    with pytest.raises(RollwireError, match=r"digest of tensor embed\.weight differs"):
        _receive(messages)


@pytest.mark.parametrize("kept", range(len(_messages())))
def test_a_stream_cut_after_any_message_is_refused(kept: int) -> None:
    with pytest.raises(RollwireError) as caught:
        _receive(_messages()[:kept])
    assert caught.value.reason == Reason.WEIGHTS_CORRUPT


@given(order=st.permutations(range(len(_messages()))).filter(lambda order: order != sorted(order)))
@settings(max_examples=200, deadline=None)
def test_a_reordered_stream_is_refused(order: list[int]) -> None:
    messages = _messages()
    with pytest.raises(RollwireError) as caught:
        _receive([messages[index] for index in order])
    assert caught.value.reason == Reason.WEIGHTS_CORRUPT


def test_a_repeated_chunk_is_refused() -> None:
    messages = _messages()
    with pytest.raises(RollwireError, match="expected was byte"):
        _receive([*messages[:2], messages[1], *messages[2:]])


@pytest.mark.parametrize(
    ("layouts", "text"),
    [
        ({**LAYOUTS, "extra": TensorLayout(FLOAT32, (1,))}, "missing"),
        ({name: layout for name, layout in LAYOUTS.items() if name != "scalar"}, "unknown"),
        ({**LAYOUTS, "norm.weight": TensorLayout(FLOAT32, (8,))}, r"float32\[7\], the model has float32\[8\]"),
        ({**LAYOUTS, "norm.weight": TensorLayout(weights_pb2.DATA_TYPE_FLOAT16, (7,))}, "the model has float16"),
    ],
)
def test_weights_of_another_model_are_refused(layouts: dict[str, TensorLayout], text: str) -> None:
    with pytest.raises(RollwireError, match=text) as caught:
        WeightAssembler(layouts, VERSION).feed(_messages()[0])
    assert caught.value.reason == Reason.WEIGHTS_MISMATCH


def test_another_version_is_refused() -> None:
    other = weights_pb2.WeightVersion(lineage="lineage-a", step=8)
    with pytest.raises(RollwireError, match="asked for was lineage-a@8"):
        WeightAssembler(LAYOUTS, other).feed(_messages()[0])


def test_a_lying_manifest_allocates_nothing() -> None:
    messages = _messages()
    messages[0].manifest.payload_bytes = 1 << 50
    with pytest.raises(RollwireError, match="announces"):
        WeightAssembler(LAYOUTS, VERSION).feed(messages[0])
