"""The record of an episode: what must hold of every trajectory, however its turns went."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.rollout.engine import Piece
from rollwire.rollout.record import EpisodeRecord, aggregate
from rollwire.v1 import environment_pb2, trajectory_pb2, weights_pb2

pb = environment_pb2


def version(step: int) -> weights_pb2.WeightVersion:
    return weights_pb2.WeightVersion(lineage="main", step=step)


TURN = st.tuples(
    st.lists(st.integers(0, 50), min_size=1, max_size=6),  # prompt
    st.lists(st.integers(0, 50), min_size=1, max_size=4),  # response
    st.integers(0, 2),  # weight step
    st.booleans(),  # new sequence
    st.floats(-1, 1),  # reward
)


@given(st.lists(TURN, min_size=1, max_size=6))
def test_arrays_masks_spans_and_turns_agree(turns: list[tuple[list[int], list[int], int, bool, float]]) -> None:
    record = EpisodeRecord()
    for prompt, response, step, new_sequence, reward in turns:
        record.add_prompt(prompt, new_sequence=new_sequence)
        logprobs = [-0.25 * (token + 1) for token in response]
        record.add_response([Piece(response, logprobs, version(step), trajectory_pb2.STOP_REASON_STOP_TOKEN)])
        record.add_outcome(pb.StepResponse(reward=reward))
    assert len(record.sequences) == 1 + sum(new for *_, new, _ in turns[1:])
    for sequence in record.sequences:
        assert len(sequence.token_ids) == len(sequence.loss_mask) == len(sequence.logprobs) >= 1
        covered = [position for span in sequence.version_spans for position in range(span.range.begin, span.range.end)]
        assert covered == [position for position, sampled in enumerate(sequence.loss_mask) if sampled]
        assert all(sampled or value == 0 for sampled, value in zip(sequence.loss_mask, sequence.logprobs, strict=True))
    for turn, (prompt, response, step, _, reward) in zip(record.turns, turns, strict=True):
        tokens = record.sequences[turn.sequence].token_ids
        assert list(tokens[turn.prompt.begin : turn.prompt.end]) == prompt
        assert list(tokens[turn.response.begin : turn.response.end]) == response
        spans = record.sequences[turn.sequence].version_spans
        assert [span.version.step for span in spans if span.range == turn.response] == [step]
        assert turn.reward == reward
    assert [turn.index for turn in record.turns] == list(range(len(turns)))
    assert record.score == pytest.approx(sum(reward for *_, reward in turns))


@given(st.lists(st.tuples(st.lists(st.integers(0, 50), max_size=3), st.integers(0, 2)), min_size=1, max_size=8))
def test_every_token_of_a_response_names_the_version_that_drew_it(pieces: list[tuple[list[int], int]]) -> None:
    pieces.append(([7], 2))
    record = EpisodeRecord()
    record.add_prompt([1, 2], new_sequence=True)
    record.add_response(
        [
            Piece(tokens, [-1.0] * len(tokens), version(step), trajectory_pb2.STOP_REASON_UNSPECIFIED)
            for tokens, step in pieces
        ]
    )
    record.add_outcome(pb.StepResponse())
    (sequence,) = record.sequences
    expected = [step for tokens, step in pieces for _ in tokens]
    named = [span.version.step for span in sequence.version_spans for _ in range(span.range.begin, span.range.end)]
    assert named == expected and list(sequence.token_ids[2:]) == [token for tokens, _ in pieces for token in tokens]
    assert sequence.version_spans[0].range.begin == 2
    neighbours = list(zip(sequence.version_spans, sequence.version_spans[1:], strict=False))
    assert all(one.range.end == two.range.begin and one.version != two.version for one, two in neighbours)


def test_terminated_and_truncated_at_once_is_terminated() -> None:
    record = EpisodeRecord()
    record.add_prompt([1], new_sequence=True)
    record.add_response([Piece([2], [-1.0], version(0), trajectory_pb2.STOP_REASON_MAX_TOKENS)])
    record.add_outcome(pb.StepResponse(terminated=True, truncated=True))
    assert record.turns[0].terminated and not record.turns[0].truncated
    assert record.turns[0].stop_reason == trajectory_pb2.STOP_REASON_MAX_TOKENS


def test_metrics_are_aggregated_as_declared() -> None:
    record = EpisodeRecord()
    for metrics in ({"a": 1.0, "b": 1.0, "c": 5.0}, {"a": 3.0, "c": 2.0}, {"a": 8.0, "b": 4.0}):
        record.add_prompt([1], new_sequence=False)
        record.add_response([Piece([2], [-1.0], version(0), trajectory_pb2.STOP_REASON_STOP_TOKEN)])
        record.add_outcome(pb.StepResponse(metrics=metrics))
    found = record.metrics({"a": pb.METRIC_AGGREGATION_LAST, "b": pb.METRIC_AGGREGATION_SUM})
    assert found == {"a": 8.0, "b": 5.0, "c": 3.5}


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (pb.METRIC_AGGREGATION_UNSPECIFIED, 3.0),
        (pb.METRIC_AGGREGATION_MEAN, 3.0),
        (pb.METRIC_AGGREGATION_SUM, 9.0),
        (pb.METRIC_AGGREGATION_LAST, 1.0),
        (pb.METRIC_AGGREGATION_FIRST, 2.0),
        (pb.METRIC_AGGREGATION_MAX, 6.0),
        (pb.METRIC_AGGREGATION_MIN, 1.0),
    ],
)
def test_aggregations(how: pb.MetricAggregation.ValueType, expected: float) -> None:
    assert aggregate([2.0, 6.0, 1.0], how) == expected


def test_turns_name_what_the_environment_showed_by_its_digest() -> None:
    record = EpisodeRecord()
    for observation in ("_P_", "P__", "_P_", None):
        record.add_prompt([1], new_sequence=True, observation=observation)
        record.add_response([Piece([2], [-0.5], version(0), trajectory_pb2.STOP_REASON_STOP_TOKEN)])
        record.add_outcome(pb.StepResponse())

    digests = [turn.observation_digest for turn in record.turns]
    assert digests[0] == digests[2] == hashlib.sha256(b"_P_").digest()
    assert digests[1] != digests[0]
    assert digests[3] == b""
