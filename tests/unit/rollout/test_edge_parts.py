"""The pure parts of the edge: prefixes, text from tokens, function calls, messages as lines, requests for sessions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollwire.rollout.agents.calls import Call, CallBook, Prompt
from rollwire.rollout.agents.messages import assistant_message, message_line, read_messages
from rollwire.rollout.agents.plans import DEFAULT_LEASE_S, read_open
from rollwire.rollout.agents.prefixes import PrefixIndex
from rollwire.rollout.agents.text import Scanner, TokenText
from rollwire.rollout.agents.tool_calls import parse_tool_calls
from rollwire.rollout.agents.trajectory import sequences_and_turns
from rollwire.rollout.engine import Piece
from rollwire.rollout.requests import Limits
from rollwire.rpc.errors import RollwireError
from rollwire.serving.config.sections import HttpSection
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2

LIMITS = Limits(100, 512, frozenset({9}), ())


@given(st.lists(st.text("ab", max_size=6), max_size=8), st.text("ab", max_size=8))
def test_the_longest_known_beginning_is_found(known: list[str], text: str) -> None:
    index: PrefixIndex[str] = PrefixIndex()
    for one in known:
        index.add(one.encode(), one)
    expected = max((one for one in known if text.startswith(one)), key=len, default=None)
    found = index.longest(text.encode())
    assert found == (None if expected is None else (expected, len(expected)))


def decode(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode("utf-8", errors="replace")


@given(st.text(max_size=12))
def test_characters_appear_when_they_are_complete(text: str) -> None:
    stream, seen = TokenText(decode), ""
    for token in text.encode():
        seen += stream.push(token)
        assert text.startswith(seen)
    assert seen + stream.finish() == text


@given(st.binary(max_size=12))
def test_bytes_that_are_no_text_stay_visible(content: bytes) -> None:
    stream = TokenText(decode)
    seen = "".join(stream.push(token) for token in content) + stream.finish()
    assert seen.replace("\ufffd", "") == content.decode("utf-8", errors="ignore").replace("\ufffd", "")


@given(
    st.lists(st.text("abc", max_size=4), max_size=8),
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
)
def test_a_wanted_text_is_found_wherever_a_stream_is_cut(pieces: list[str], wanted: list[str]) -> None:
    scanner, seen = Scanner(wanted), ""
    for piece in pieces:
        seen += scanner.push(piece)
        if scanner.found is not None:
            break
    else:
        seen += scanner.finish()
    whole = "".join(pieces)
    if scanner.found is None:
        assert seen == whole and not any(one in whole for one in wanted)
    else:
        assert whole.startswith(seen + scanner.found)
        assert not any(one in seen for one in wanted)


def test_function_calls_are_read_in_order() -> None:
    text = '<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call> and <tool_call>{"name": "b"}'
    calls = parse_tool_calls(text, 3)
    assert [(call.call_id, call.name, json.loads(call.arguments)) for call in calls] == [
        ("call_3_0", "a", {"x": 1}),
        ("call_3_1", "b", {}),
    ]
    nested = parse_tool_calls('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', 0)
    assert json.loads(nested[0].arguments) == {"x": 1}


@pytest.mark.parametrize(
    "block",
    [
        "",
        "null",
        "[]",
        '{"name": 5}',
        '{"name": "a", "arguments": []}',
        '{"name": "a", "arguments": "["}',
        "[" * 9999,
        # What Python reads, but no JSON can be written of.
        '{"name": "a", "arguments": {"x": "\\ud800"}}',
        '{"name": "\\udc00"}',
        '{"name": "a", "arguments": "{\\"x\\": NaN}"}',
        '{"name": "a", "arguments": {"x": 1e999}}',
        '{"name": "a", "arguments": {"x": %s}}' % ("[" * 500 + "]" * 500),
    ],
)
def test_one_malformed_function_call_makes_all_of_them_text(block: str) -> None:
    assert parse_tool_calls(f'<tool_call>{{"name": "a"}}</tool_call><tool_call>{block}</tool_call>', 0) == []


def test_an_answer_is_the_same_line_however_it_is_sent_back() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}
    line = message_line(assistant_message("\n", [call]))
    forms: list[Any] = [
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "assistant", "content": "", "tool_calls": [call], "annotations": []},
        {"tool_calls": [call], "role": "assistant"},
    ]
    assert {message_line(read_messages([form])[0]) for form in forms} == {line}
    other = {**call, "id": "d"}
    assert message_line(assistant_message("", [other])) != line


def piece(token: int, step: int = 0, reason: int = trajectory_pb2.STOP_REASON_STOP_TOKEN) -> Piece:
    version = weights_pb2.WeightVersion(lineage="main", step=step)
    return Piece([token], [-1.0], version, trajectory_pb2.StopReason.ValueType(reason))


@given(st.data())
def test_every_sampled_token_is_trained_once_and_every_sequence_is_what_the_engine_saw(data: Any) -> None:
    """Any tree of calls: their prompts are what was asked, each response is sampled in exactly one sequence."""
    book, done = CallBook(), list[Call]()
    for number in range(data.draw(st.integers(1, 8))):
        parent = data.draw(st.sampled_from([None, *done]))
        block = data.draw(st.lists(st.integers(0, 3), min_size=0 if parent else 1, max_size=3))
        call = Call(number, f"c{number}", parent, block)
        book.calls.append(call)
        prompt = call.prompt_ids()
        assert len(prompt) == call.length
        book.complete(call, Prompt(parent, block), [piece(4, number), piece(5, number)], b"", b"")
        done.append(call)
        assert book.extending([*prompt, 4, 5])[0] is not None
    sequences, turns = sequences_and_turns(done, {}, truncated=False)
    assert len(turns) == len(done) and sum(sum(s.loss_mask) for s in sequences) == 2 * len(done)
    seen = sorted(list(sequences[turn.sequence].token_ids[: turn.response.end]) for turn in turns)
    assert seen == sorted([*call.prompt_ids(), 4, 5] for call in done)
    steps = sorted(span.version.step for s in sequences for span in s.version_spans)
    assert steps == [call.number for call in done]


def opening(**changes: Any) -> rollout_pb2.OpenPolicySessionRequest:
    settings: dict[str, Any] = {
        "fence": trajectory_pb2.Fence(run_id="run", epoch=1),
        "session_id": "s1",
        "key_digest": b"k" * 32,
        "sampling": trajectory_pb2.SamplingSettings(max_tokens=6),
        "max_calls": 3,
        "group_id": "g1",
        "environment_tag": "Tag",
    }
    return rollout_pb2.OpenPolicySessionRequest(**{**settings, **changes})


def test_defaults_of_a_session_are_resolved() -> None:
    plan = read_open(opening(), LIMITS)
    assert plan.max_sequence_tokens == 512 and plan.lease_s == DEFAULT_LEASE_S
    assert plan.sampling.temperature == 1.0 and plan.sampling.stop_token_ids == {9}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session_id", ""),
        ("session_id", "a b"),
        ("session_id", "x" * 65),
        ("session_id", "a\x07"),
        ("key_digest", b"short"),
        ("max_sequence_tokens", 1),
        ("max_sequence_tokens", 513),
        ("max_calls", 0),
        ("max_calls", 1025),
        ("group_id", "G!"),
        ("environment_tag", ""),
        ("sampling", trajectory_pb2.SamplingSettings(max_tokens=0)),
        ("sampling", trajectory_pb2.SamplingSettings(max_tokens=5, temperature=float("nan"))),
        ("lease", {"seconds": 0, "nanos": 5}),
        ("lease", {"seconds": 3601}),
    ],
)
def test_a_field_outside_its_range_names_its_path(field: str, value: Any) -> None:
    with pytest.raises(RollwireError) as caught:
        read_open(opening(**{field: value}), LIMITS)
    assert caught.value.reason == "INVALID_FIELD" and next(iter(caught.value.fields)).startswith(field)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"address": "8000"}, "host:port"),
        ({"address": "127.0.0.1:99999"}, "host:port"),
        ({"address": "10.0.0.7:8000"}, "insecure"),
        ({"address": "0.0.0.0:8000", "insecure": True}, "public_url"),
        ({"address": "127.0.0.1:0", "public_url": "agents.example.org"}, "http://"),
    ],
)
def test_where_agents_are_served_is_checked(settings: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        HttpSection(**settings)
    assert HttpSection().address is None
