"""Only tokens of the learner's own weights and distribution say something about engine and learner."""

from __future__ import annotations

from typing import Any

import pytest

from rollwire.coordinator.batch import select_batch
from rollwire.coordinator.comparable import Comparable
from rollwire.serving.config.algorithm import AlgorithmSection
from rollwire.v1 import trajectory_pb2, weights_pb2

SAMPLED, RAW = trajectory_pb2.LOGPROB_MODE_SAMPLED, trajectory_pb2.LOGPROB_MODE_RAW


def at(step: int, temperature: float = 1.0, lineage: str = "line") -> Comparable:
    return Comparable(weights_pb2.WeightVersion(lineage=lineage, step=step), temperature)


def settings(**fields: Any) -> trajectory_pb2.SamplingSettings:
    plain = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 9, "logprob_mode": SAMPLED}
    return trajectory_pb2.SamplingSettings(**{**plain, **fields})


@pytest.mark.parametrize(
    ("temperature", "fields", "same"),
    [
        (1.0, {}, True),
        (0.7, {"temperature": 0.7}, True),
        (0.7, {"temperature": 1.0}, False),
        (1.0, {"temperature": 0.7}, False),
        (1.0, {"temperature": 0.0}, False),
        (1.0, {"top_p": 0.9}, False),
        (1.0, {"top_k": 20}, False),
        (1.0, {"temperature": 0.7, "logprob_mode": RAW}, True),
        (0.7, {"temperature": 0.7, "logprob_mode": RAW}, False),
        (1.0, {"logprob_mode": trajectory_pb2.LOGPROB_MODE_UNSPECIFIED}, False),
    ],
)
def test_same_distribution(temperature: float, fields: dict[str, Any], same: bool) -> None:
    assert at(0, temperature).same_distribution(settings(**fields)) is same


@pytest.mark.parametrize(
    ("versions", "comparable", "covered"),
    [
        ((3, 3), at(3), True),
        ((2, 2), at(3), False),
        ((2, 3), at(3), False),
        ((3, 3), at(3, lineage="other"), False),
    ],
)
def test_every_token_must_come_from_the_learners_weights(
    versions: tuple[int, int], comparable: Comparable, covered: bool, make_trajectory: Any
) -> None:
    trajectory = make_trajectory(turns=[(3, 2), (2, 2)], versions=versions)
    trajectory.sampling.CopyFrom(settings())
    assert comparable.covers(trajectory, trajectory.sequences[0]) is covered


def test_a_batch_marks_its_comparable_samples(make_trajectory: Any) -> None:
    group = [make_trajectory("a", episode, float(episode), versions=[episode + 1]) for episode in range(3)]
    for trajectory in group:
        trajectory.sampling.CopyFrom(settings())
    batch = select_batch([group], AlgorithmSection(), at(2))
    assert [sample.comparable_logprobs for sample in batch.samples] == [False, True, False]
    unmarked = select_batch([group], AlgorithmSection())
    assert not any(sample.comparable_logprobs for sample in unmarked.samples)
