"""Frames between server and workers: taken apart however they arrive, and never longer than allowed."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.environment.isolation.frames import MAX_PAYLOAD_BYTES, FrameError, FrameReader, Kind, frame

FRAMES = st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=300)), max_size=20)


@given(FRAMES, st.lists(st.integers(1, 500), min_size=1))
def test_frames_arrive_as_they_were_sent_however_they_are_cut(sent: list[tuple[Kind, bytes]], cuts: list[int]) -> None:
    stream = b"".join(frame(kind, payload) for kind, payload in sent)
    reader, received, position, turn = FrameReader(), [], 0, 0
    while position < len(stream):
        size = cuts[turn % len(cuts)]
        received += list(reader.feed(stream[position : position + size]))
        position, turn = position + size, turn + 1
    assert received == sent


@given(st.binary(min_size=5))
def test_garbage_is_refused_or_waits_for_more(garbage: bytes) -> None:
    reader = FrameReader()
    try:
        taken = list(reader.feed(garbage))
    except FrameError:
        return
    assert sum(5 + len(payload) for _, payload in taken) <= len(garbage)


@pytest.mark.parametrize("header", [struct.pack(">IB", MAX_PAYLOAD_BYTES + 1, Kind.REPLY), struct.pack(">IB", 1, 99)])
def test_a_header_is_judged_before_its_payload_is_kept(header: bytes) -> None:
    reader = FrameReader()
    assert list(reader.feed(frame(Kind.REPLY, b"a"))) == [(Kind.REPLY, b"a")]
    with pytest.raises(FrameError, match="allowed: kinds 1 to"):
        list(reader.feed(header))


def test_frames_before_garbage_are_taken() -> None:
    reader, taken = FrameReader(), []
    with pytest.raises(FrameError):
        for item in reader.feed(frame(Kind.STARTED) + b"\xff" * 5):
            taken.append(item)
    assert taken == [(Kind.STARTED, b"")]


def test_the_longest_payload_fits_and_no_longer_one() -> None:
    longest = bytes(MAX_PAYLOAD_BYTES)
    assert list(FrameReader().feed(frame(Kind.REPLY, longest))) == [(Kind.REPLY, longest)]
    with pytest.raises(FrameError, match=f"allowed: at most {MAX_PAYLOAD_BYTES}"):
        frame(Kind.REPLY, longest + b"x")
