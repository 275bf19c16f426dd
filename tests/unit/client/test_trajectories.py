from __future__ import annotations

import hashlib

import pytest

from rollwire.client import TrajectoryBuilder
from rollwire.coordinator.pushed_checks import Terms, check_identity, check_terms
from rollwire.v1 import coordinator_pb2, rollout_pb2, trajectory_pb2, weights_pb2

SAMPLING = trajectory_pb2.SamplingSettings(
    temperature=1, top_p=1, max_tokens=8, logprob_mode=trajectory_pb2.LOGPROB_MODE_SAMPLED
)
TERMS = coordinator_pb2.GetSubmissionTermsResponse(
    sampling=SAMPLING, tokenizer_hash="a" * 64, template_hash="b" * 64, max_sequence_tokens=100
)


def piece(
    tokens: list[int], step: int = 3, stop: int = trajectory_pb2.STOP_REASON_UNSPECIFIED
) -> rollout_pb2.GenerateResponse:
    version = weights_pb2.WeightVersion(lineage="line", step=step)
    return rollout_pb2.GenerateResponse(
        token_ids=tokens, logprobs=[-0.5] * len(tokens), version=version, stop_reason=stop
    )


def builder() -> TrajectoryBuilder:
    return TrajectoryBuilder(TERMS, "Game", group_id="group-1", episode_index=2, environment_seed=9)


def check(trajectory: trajectory_pb2.Trajectory) -> None:
    check_identity(trajectory)
    check_terms(trajectory, Terms(SAMPLING, 100, 50, "a" * 64, "b" * 64))


def test_a_prompt_that_extends_what_was_drawn_continues_the_sequence() -> None:
    episode = builder()
    episode.add_turn([1, 2], [piece([3]), piece([4])], reward=0.5, observation="map")
    assert episode.token_ids == [1, 2, 3, 4]
    episode.add_turn([1, 2, 3, 4, 5], [piece([6]), piece([7], step=4)], reward=1.0, terminated=True)
    found = episode.build({"success": 1.0})
    (sequence,) = found.sequences
    assert list(sequence.token_ids) == [1, 2, 3, 4, 5, 6, 7]
    assert list(sequence.loss_mask) == [False, False, True, True, False, True, True]
    spans = [(span.range.begin, span.range.end, span.version.step) for span in sequence.version_spans]
    assert spans == [(2, 4, 3), (5, 6, 3), (6, 7, 4)]
    assert [(turn.prompt.begin, turn.prompt.end, turn.response.end) for turn in found.turns] == [(0, 2, 4), (4, 5, 7)]
    assert found.turns[0].observation_digest == hashlib.sha256(b"map").digest()
    assert (found.score, found.end, found.metrics["success"]) == (1.5, trajectory_pb2.EPISODE_END_TERMINATED, 1.0)
    check(found)


def test_any_other_prompt_starts_a_sequence() -> None:
    episode = builder()
    episode.add_turn([1, 2], [piece([3])], reward=0.0)
    episode.add_turn([1, 9, 3, 4], [piece([5])], reward=0.0)
    episode.add_turn([1, 9], [piece([5])], reward=0.0)
    found = episode.build()
    assert [list(sequence.token_ids) for sequence in found.sequences] == [[1, 2, 3], [1, 9, 3, 4, 5], [1, 9, 5]]
    assert [turn.sequence for turn in found.turns] == [0, 1, 2]
    assert found.end == trajectory_pb2.EPISODE_END_TRUNCATED
    check(found)


def test_two_builds_and_two_builders_do_not_share() -> None:
    episode = builder()
    episode.add_turn([1], [piece([3])], reward=1.0)
    first = episode.build()
    episode.add_turn([1, 3, 4], [piece([5])], reward=1.0)
    assert len(first.turns) == 1 and len(episode.build().turns) == 2
    assert first.trajectory_id != builder()._trajectory.trajectory_id


def test_what_cannot_be_a_turn() -> None:
    episode = builder()
    with pytest.raises(ValueError, match="no turn"):
        episode.build()
    with pytest.raises(ValueError, match="hold no tokens"):
        episode.add_turn([1], [piece([])], reward=0.0)
    with pytest.raises(ValueError, match="generate the turn again"):
        episode.add_turn([1], [piece([2], stop=trajectory_pb2.STOP_REASON_ABORTED)], reward=0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    episode = builder()
    with pytest.raises(ValueError, match=f"reward is {value}; allowed: a finite number"):
        episode.add_turn([1], [piece([3])], reward=value)
    with pytest.raises(ValueError, match=rf"metrics\['far'\] is {value}; allowed"):
        episode.add_turn([1], [piece([3])], reward=0.0, metrics={"far": value})
    assert episode.token_ids == []
    episode.add_turn([1], [piece([3])], reward=0.0)
    with pytest.raises(ValueError, match=rf"metrics\['success'\] is {value}; allowed"):
        episode.build({"success": value})
