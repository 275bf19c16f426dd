"""The sparse encoding: exact on bits, as documented, and never anything but WEIGHTS_CORRUPT for a bad payload."""

from __future__ import annotations

import struct
import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollwire.rpc import weight_delta
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.weight_delta import (
    MAX_BLOCK_GAPS,
    UNCHANGED,
    SparseEncoder,
    SparseTensor,
    apply_sparse,
    compose,
    sparse_blocks,
    supported_encodings,
)
from rollwire.v1 import weights_pb2

SPARSE = weights_pb2.TENSOR_ENCODING_SPARSE
ZSTD = weights_pb2.TENSOR_ENCODING_SPARSE_ZSTD
UNLIMITED = 1 << 40
WORDS: dict[int, Any] = {2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


def _bytes(words: np.ndarray) -> memoryview:
    return memoryview(words).cast("B")


def _encode(old: np.ndarray, new: np.ndarray, step: int = 1 << 18, limit_bytes: int = UNLIMITED) -> SparseTensor | None:
    encoder = SparseEncoder(old.itemsize, limit_bytes)
    for start in range(0, len(old), step):
        encoder.compare(_bytes(old[start : start + step]), _bytes(new[start : start + step]))
    return encoder.finish()


def _known(change: SparseTensor | None) -> SparseTensor:
    assert change is not None
    return change


def _apply(old: np.ndarray, change: SparseTensor) -> np.ndarray:
    target = old.copy()
    apply_sparse(_bytes(target), old.itemsize, change)
    return target


def _decode_as_documented(old: list[int], payload: bytes, word_bytes: int) -> list[int]:
    """The decoder that weights.proto describes, in plain Python."""
    words, at, element = list(old), 0, 0
    while at < len(payload):
        count, gap_bytes = struct.unpack_from("<II", payload, at)
        gaps = payload[at + 8 : at + 8 + gap_bytes]
        planes = payload[at + 8 + gap_bytes : at + 8 + gap_bytes + word_bytes * count]
        at += 8 + gap_bytes + word_bytes * count
        selected = 0
        for gap in gaps:
            element += gap
            if gap < 255:
                z = int.from_bytes(bytes(planes[plane * count + selected] for plane in range(word_bytes)), "little")
                difference = z // 2 if z % 2 == 0 else -(z + 1) // 2
                words[element] = (words[element] + difference) % (1 << 8 * word_bytes)
                element += 1
                selected += 1
        assert selected == count
    return words


@st.composite
def _pairs(draw: st.DrawFn, count: int = 2) -> list[np.ndarray]:
    """Versions of one tensor: equal words except for a few, or for all."""
    dtype = WORDS[draw(st.sampled_from([2, 4, 8]))]
    size = draw(st.integers(1, 2000))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    versions = [generator.integers(0, 256, size * dtype.itemsize, dtype=np.uint8).view(dtype)]
    for _ in range(count - 1):
        words = versions[-1].copy()
        for at in draw(st.lists(st.integers(0, size - 1), max_size=20)):
            words[at] = draw(hnp.from_dtype(dtype))
        if draw(st.booleans()):
            words += generator.integers(0, 3, size).astype(dtype)
        versions.append(words)
    return versions


@given(pair=_pairs(), step=st.integers(1, 700))
@settings(max_examples=200, deadline=None)
def test_any_change_survives_bit_for_bit(pair: list[np.ndarray], step: int) -> None:
    old, new = pair
    change = _known(_encode(old, new, step))
    assert (_apply(old, change) == new).all()
    assert change.changed == np.count_nonzero(old != new)
    assert _decode_as_documented(old.tolist(), bytes(change.plain().payload), old.itemsize) == new.tolist()


@given(versions=_pairs(count=4))
@settings(max_examples=100, deadline=None)
def test_composed_changes_are_the_change_between_the_outermost_versions(versions: list[np.ndarray]) -> None:
    changes = [_known(_encode(old, new, 300)) for old, new in pairwise(versions)]
    composed = _known(compose(changes, versions[0].itemsize, len(versions[0]), UNLIMITED))
    assert (_apply(versions[0], composed) == versions[-1]).all()
    assert composed.changed == np.count_nonzero(versions[0] != versions[-1])


def test_a_change_that_is_taken_back_is_none() -> None:
    first, second = np.zeros(900, "<u2"), np.zeros(900, "<u2")
    second[[5, 600]] = (1, 0xFFFF)
    there, back = _known(_encode(first, second)), _known(_encode(second, first))
    assert compose([there, back], 2, 900, UNLIMITED) == UNCHANGED
    second[7] = 9
    there = _known(_encode(first, second))
    assert _known(compose([there, back], 2, 900, UNLIMITED)).changed == 1


def test_nan_payloads_and_signed_zeros_are_changes() -> None:
    old = np.array([0x7FC0, 0x7FC0, 0x0000, 0x8000], "<u2")  # bfloat16: two NaNs, +0, -0
    new = np.array([0x7FC0, 0x7FC1, 0x8000, 0x8000], "<u2")
    change = _known(_encode(old, new))
    assert change.changed == 2
    assert (_apply(old, change) == new).all()


def test_equal_tensors_have_no_payload() -> None:
    words = np.arange(1000, dtype="<u2")
    assert _encode(words, words) == UNCHANGED == SparseTensor(weights_pb2.TENSOR_ENCODING_UNCHANGED, 0, 0, b"")


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 65_536])
def test_every_width_of_gap(gap: int) -> None:
    old = np.zeros(2 * gap + 10, "<u2")
    new = old.copy()
    new[[gap, 2 * gap + 1]] = (1, 0xFFFF)
    assert (_apply(old, _known(_encode(old, new, 100))) == new).all()


def test_a_gap_longer_than_a_block_holds_is_divided() -> None:
    encoder = SparseEncoder(2, UNLIMITED)
    one = np.array([1], "<u2")
    elements = 3 * 255 * MAX_BLOCK_GAPS
    encoder.put(np.array([0]), one, elements)
    encoder.put(np.array([7]), one, 8)
    change = _known(encoder.finish())
    found = np.concatenate([index for index, _ in sparse_blocks(change, 2, elements + 8)])
    assert found.tolist() == [0, elements + 7]


def test_one_percent_of_changed_values_takes_one_percent_of_the_bytes() -> None:
    """The target for a whole update is 2 %; values that move by one unit in the last place are the usual case."""
    generator = np.random.default_rng(0)
    old = (generator.standard_normal(1 << 20, dtype=np.float32).view(np.uint32) >> 16).astype("<u2")
    new = old.copy()
    at = generator.choice(len(old), len(old) // 100, replace=False)
    new[at] += np.where(generator.random(len(at)) < 0.5, 1, 0xFFFF).astype("<u2")
    change = _known(_encode(old, new))
    assert change.encoding == ZSTD
    assert len(change.payload) < 0.01 * old.nbytes
    assert change.sparse_bytes < 0.02 * old.nbytes


def test_a_change_that_does_not_pay_is_given_up() -> None:
    generator = np.random.default_rng(0)
    old, new = generator.integers(0, 1 << 16, (2, 1 << 16)).astype("<u2")
    encoder = SparseEncoder(2, old.nbytes // 2)
    encoder.compare(_bytes(old), _bytes(new))
    assert encoder.finish() is None
    assert encoder.held_bytes == 0


def test_without_zstandard_nothing_is_compressed_or_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    old = np.zeros(5000, "<u2")
    new = old.copy()
    new[::50] = 1
    packed = _known(_encode(old, new))
    assert packed.encoding == ZSTD and ZSTD in supported_encodings()
    monkeypatch.setattr(weight_delta, "zstandard", None)
    change = _known(_encode(old, new))
    assert change.encoding == SPARSE and ZSTD not in supported_encodings()
    assert (_apply(old, change) == new).all()
    with pytest.raises(RollwireError, match="did not offer"):
        _apply(old, packed)


# Hostile payloads.

OLD = np.arange(3000, dtype="<u2")
NEW = OLD.copy()
NEW[::7] += 3
NEW[2000:] += 1
CHANGE = _known(_encode(OLD, NEW, 500))
PLAIN = CHANGE.plain()


def _refused(change: SparseTensor) -> None:
    with pytest.raises(RollwireError) as caught:
        _apply(OLD, change)
    assert caught.value.reason == Reason.WEIGHTS_CORRUPT


def _same_or_refused(change: SparseTensor) -> None:
    """Damage may only be refused or change values; the tensor's digest finds the latter."""
    try:
        _apply(OLD, change)
    except RollwireError as error:
        assert error.reason == Reason.WEIGHTS_CORRUPT


@given(data=st.data(), compressed=st.booleans())
@settings(max_examples=500, deadline=None)
def test_damaged_payloads_never_raise_anything_else(data: st.DataObject, compressed: bool) -> None:
    change = CHANGE if compressed else PLAIN
    payload = bytearray(change.payload)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] = data.draw(st.integers(0, 255))
    _same_or_refused(SparseTensor(change.encoding, change.changed, change.sparse_bytes, payload))


@given(payload=st.binary(max_size=200), changed=st.integers(0, 60), encoding=st.sampled_from([SPARSE, ZSTD]))
@settings(max_examples=400, deadline=None)
def test_arbitrary_payloads_never_raise_anything_else(payload: bytes, changed: int, encoding: Any) -> None:
    _same_or_refused(SparseTensor(encoding, changed, len(payload) if encoding == SPARSE else 300, payload))


@pytest.mark.parametrize("change", [CHANGE, PLAIN], ids=["zstd", "plain"])
def test_truncated_or_longer_payloads_are_refused(change: SparseTensor) -> None:
    for cut in range(1, len(change.payload)):
        _refused(SparseTensor(change.encoding, change.changed, change.sparse_bytes, change.payload[:-cut]))
    for more in (b"\0", b"\0" * 20, bytes(change.payload)):
        _refused(SparseTensor(change.encoding, change.changed, change.sparse_bytes, bytes(change.payload) + more))


@pytest.mark.parametrize("length", range(1, 60))
def test_plain_payloads_cut_inside_a_block_are_refused_even_when_the_length_is_announced(length: int) -> None:
    _refused(SparseTensor(SPARSE, PLAIN.changed, len(PLAIN.payload) - length, PLAIN.payload[:-length]))


@pytest.mark.parametrize(
    ("block", "changed"),
    [
        (struct.pack("<II", 1, 0) + b"\1\0", 1),  # no gap byte
        (struct.pack("<II", 2, 1) + b"\0" + b"\1\0" * 2, 2),  # more elements than gap bytes
        (struct.pack("<II", 1, 2) + b"\0\0" + b"\1\0", 1),  # fewer elements than selected
        (struct.pack("<II", 1, 1) + b"\xff" + b"\1\0", 1),  # none selected
        (struct.pack("<II", 1, 12) + b"\xff" * 11 + b"\xc3" + b"\1\0", 1),  # element 3000 of 3000
        (struct.pack("<II", 0, MAX_BLOCK_GAPS + 1) + b"\0" * (MAX_BLOCK_GAPS + 1), 0),  # too many gap bytes
        (struct.pack("<II", 2**32 - 1, 2**32 - 1) + b"\0", 1),
        (struct.pack("<II", 1, 1) + b"\0" + b"\1\0", 2),  # fewer elements than announced
    ],
)
def test_blocks_that_contradict_themselves_are_refused(block: bytes, changed: int) -> None:
    _refused(SparseTensor(SPARSE, changed, len(block), block))


def test_the_last_element_can_be_selected() -> None:
    block = struct.pack("<II", 1, 12) + b"\xff" * 11 + b"\xc2" + b"\2\0"
    assert _apply(OLD, SparseTensor(SPARSE, 1, len(block), block))[2999] == OLD[2999] + 1


@pytest.mark.parametrize("announced", [True, False])
def test_a_decompression_bomb_costs_no_memory(announced: bool) -> None:
    size = 1 << 28
    packer = zstandard.ZstdCompressor().compressobj(size=size if announced else -1)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(size >> 20)) + packer.flush()
    tracemalloc.start()
    try:
        _refused(SparseTensor(ZSTD, CHANGE.changed, CHANGE.sparse_bytes, bomb))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_window_of_a_gigabyte_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, compression_level=1)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    payload = packer.compress(PLAIN.payload) + packer.flush()
    _refused(SparseTensor(ZSTD, CHANGE.changed, CHANGE.sparse_bytes, payload))
