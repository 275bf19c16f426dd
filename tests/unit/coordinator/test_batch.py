from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rollwire.coordinator.advantages import grpo
from rollwire.coordinator.batch import Batch, select_batch
from rollwire.coordinator.credit import assign
from rollwire.serving.config.algorithm import AlgorithmSection
from rollwire.v1 import trajectory_pb2

Maker = Callable[..., trajectory_pb2.Trajectory]


def group(make: Maker, name: str, scores: list[float]) -> list[trajectory_pb2.Trajectory]:
    return [make(name, episode, score) for episode, score in enumerate(scores)]


def build_batch(groups: list[list[trajectory_pb2.Trajectory]], advantage: str, **settings: object) -> Batch:
    algorithm = AlgorithmSection.model_validate({"advantage": advantage, **settings})
    batch = select_batch(groups, algorithm)
    assign(batch, algorithm)
    return batch


def test_samples_follow_groups_and_episodes_and_carry_the_advantage_at_sampled_tokens(make_trajectory: Maker) -> None:
    groups = [group(make_trajectory, "a", [1, 0, 0]), group(make_trajectory, "b", [0, 0, 1])]
    batch = build_batch(groups, "grpo", filter_zero_variance=True)
    assert [sample.sample_id for sample in batch.samples] == ["a.0.0", "a.1.0", "a.2.0", "b.0.0", "b.1.0", "b.2.0"]
    expected = [*grpo(np.array([1.0, 0.0, 0.0])), *grpo(np.array([0.0, 0.0, 1.0]))]
    for sample, advantage in zip(batch.samples, expected, strict=True):
        assert list(sample.loss_mask) == [False, False, False, True, True]
        assert list(sample.advantages) == pytest.approx([0, 0, 0, advantage, advantage])
        assert list(sample.token_ids) == [1, 2, 3, 4, 5]
        assert list(sample.logprobs) == pytest.approx([0, 0, 0, -0.5, -0.5])


def test_groups_without_signal_are_consumed_but_not_trained(make_trajectory: Maker) -> None:
    groups = [group(make_trajectory, "a", [1, 1]), group(make_trajectory, "b", [0, 1])]
    batch = build_batch(groups, "grpo", filter_zero_variance=True)
    assert [trajectory.group_id for trajectory in batch.trained] == ["b", "b"]
    assert [trajectory.group_id for trajectory in batch.filtered] == ["a", "a"]
    assert (batch.filtered_groups, len(batch.samples), len(batch.consumed)) == (1, 2, 4)
    unfiltered = build_batch(groups, "grpo", filter_zero_variance=False)
    assert (unfiltered.filtered_groups, len(unfiltered.samples)) == (0, 4)


def test_a_batch_of_equal_scores_has_no_samples(make_trajectory: Maker) -> None:
    batch = build_batch([group(make_trajectory, "a", [0.1] * 8)], "rloo", filter_zero_variance=True)
    assert batch.samples == [] and len(batch.filtered) == 8


def test_reinforce_keeps_groups_in_which_everybody_won(make_trajectory: Maker) -> None:
    batch = build_batch([group(make_trajectory, "a", [1, 1])], "reinforce", filter_zero_variance=True)
    assert [sample.advantages[4] for sample in batch.samples] == [1, 1]


def test_the_first_token_is_never_trained(make_trajectory: Maker) -> None:
    groups = [[make_trajectory("a", 0, 1.0, turns=[(0, 3)]), make_trajectory("a", 1, 0.0, turns=[(0, 1)])]]
    batch = build_batch(groups, "dr_grpo", filter_zero_variance=True)
    (sample,) = batch.samples  # the other episode has nothing but its first token
    assert list(sample.loss_mask) == [False, True, True]
    assert list(sample.advantages) == [0, 0.5, 0.5]
    assert len(batch.trained) == 2


def test_a_split_trajectory_gives_one_sample_per_sequence(make_trajectory: Maker) -> None:
    split = make_trajectory("a", 0, 1.0)
    later = make_trajectory("a", 0, 1.0, turns=[(1, 1)])
    split.sequences.append(later.sequences[0])
    later.turns[0].sequence = 1
    split.turns.append(later.turns[0])
    batch = build_batch([[split, make_trajectory("a", 1, 0.0)]], "dr_grpo", filter_zero_variance=True)
    assert [sample.sample_id for sample in batch.samples] == ["a.0.0#0", "a.0.0#1", "a.1.0"]
    assert list(batch.samples[1].advantages) == [0, 0.5]
