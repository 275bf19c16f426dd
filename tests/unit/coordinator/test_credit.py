"""What stands in the samples of a batch after advantages were assigned, and what is reported of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollwire.coordinator.batch import Batch, select_batch
from rollwire.coordinator.credit import assign
from rollwire.coordinator.divergence import divergence, next_coefficient
from rollwire.serving.config.algorithm import AlgorithmSection, KlSection
from rollwire.v1 import trajectory_pb2

Maker = Callable[..., trajectory_pb2.Trajectory]


def prepared(groups: list[list[trajectory_pb2.Trajectory]], settings: dict[str, Any], **scores: Any) -> Batch:
    algorithm = AlgorithmSection.model_validate(settings)
    batch = select_batch(groups, algorithm)
    given = {name: [make(sample) for sample in batch.samples] for name, make in scores.items() if callable(make)}
    assign(batch, algorithm, **{**scores, **given})
    return batch


def flat(batch: Batch, name: str) -> list[float]:
    """Returns a field of all samples at the trained positions."""
    return [
        value
        for sample in batch.samples
        for value, trained in zip(getattr(sample, name), sample.loss_mask, strict=True)
        if trained
    ]


def constant(value: float) -> Callable[[Any], np.ndarray]:
    return lambda sample: np.full(len(sample.token_ids), value, np.float32)


@pytest.fixture
def group(make_trajectory: Maker) -> list[trajectory_pb2.Trajectory]:
    """Two episodes: two turns of 2 and 3 tokens worth 1, one turn of 2 tokens worth 0."""
    return [make_trajectory("a", 0, 1.0, turns=[(3, 2), (2, 3)]), make_trajectory("a", 1, 0.0)]


def test_a_penalty_in_the_reward_reduces_what_comes_before_it(group: list[trajectory_pb2.Trajectory]) -> None:
    kl = {"coefficient": 0.1, "apply_to": "reward", "estimator": "k1"}
    # The episodes' log-probabilities are -0.5, so that d is 1.5 at every token.
    batch = prepared([group], {"advantage": "dr_grpo", "kl": kl}, kl_coefficient=0.2, reference=constant(-2.0))

    penalty = 0.2 * 1.5
    expected = [0.5 - penalty * left for left in (5, 4, 3, 2, 1)] + [-0.5 - penalty * left for left in (2, 1)]
    assert flat(batch, "advantages") == pytest.approx(expected)
    assert not any(sample.reference_logprobs for sample in batch.samples)
    assert batch.metrics["critic/kl"] == pytest.approx(1.5)
    assert batch.metrics["critic/kl_coef"] == 0.2
    assert batch.metrics["critic/ref_log_prob/mean"] == pytest.approx(-2)
    assert batch.metrics["critic/old_log_prob/mean"] == pytest.approx(-0.5)
    assert batch.metrics["critic/rewards/max"] == pytest.approx(0.5 - 5 * penalty)


def test_a_divergence_in_the_loss_travels_with_the_samples(group: list[trajectory_pb2.Trajectory]) -> None:
    kl = {"coefficient": 0.1, "estimator": "k3"}
    batch = prepared([group], {"advantage": "dr_grpo", "kl": kl}, kl_coefficient=0.1, reference=constant(-2.0))

    assert flat(batch, "advantages") == pytest.approx([0.5] * 5 + [-0.5] * 2)
    assert flat(batch, "reference_logprobs") == pytest.approx([-2.0] * 7)
    assert batch.metrics["critic/kl"] == pytest.approx(math.exp(-1.5) + 0.5)
    assert batch.kl_coefficient == 0.1


def test_gae_fills_in_returns_and_reports_how_well_they_were_predicted(group: list[trajectory_pb2.Trajectory]) -> None:
    settings = {"advantage": "gae", "gae_lambda": 1.0, "value_clip": 0.2}
    batch = prepared([group], settings, values=constant(0.25))

    assert flat(batch, "returns") == pytest.approx([1.0] * 5 + [0.0] * 2)
    assert flat(batch, "advantages") == pytest.approx([0.75] * 5 + [-0.25] * 2)
    assert flat(batch, "values") == pytest.approx([0.25] * 7)
    assert batch.metrics["critic/vf_explained_var"] == pytest.approx(0)
    assert batch.metrics["critic/returns/mean"] == pytest.approx(5 / 7)
    assert batch.metrics["critic/values/max"] == pytest.approx(0.25)
    assert batch.metrics["critic/rewards/mean"] == pytest.approx(0.5)


def test_predictions_travel_with_the_samples_for_the_value_clip_alone(group: list[trajectory_pb2.Trajectory]) -> None:
    batch = prepared([group], {"advantage": "gae"}, values=constant(0.25))

    assert not any(sample.values for sample in batch.samples)


def test_the_critic_learns_from_groups_of_equal_scores(make_trajectory: Maker) -> None:
    lost = [make_trajectory("a", episode, 0.0) for episode in range(2)]

    assert len(prepared([lost], {"advantage": "gae"}, values=constant(0.0)).samples) == 2
    assert len(prepared([lost], {"advantage": "grpo"}).samples) == 0


def test_advantages_are_whitened_and_then_clipped(group: list[trajectory_pb2.Trajectory]) -> None:
    whitened = flat(prepared([group], {"advantage": "dr_grpo", "whiten_advantages": True}), "advantages")
    assert np.mean(whitened) == pytest.approx(0, abs=1e-6)
    assert np.var(whitened, ddof=1) == pytest.approx(1, abs=1e-6)

    settings = {"advantage": "dr_grpo", "whiten_advantages": True, "advantage_clip": 1.0}
    batch = prepared([group], settings)
    assert flat(batch, "advantages") == pytest.approx([min(max(value, -1), 1) for value in whitened])
    assert batch.metrics["critic/advantage_clip_frac"] == pytest.approx(2 / 7)


def test_rewards_of_turns_are_clipped_before_anything_else(make_trajectory: Maker) -> None:
    group = [make_trajectory("a", 0, 10.0), make_trajectory("a", 1, 0.0)]
    batch = prepared([group], {"advantage": "dr_grpo", "reward_clip": 2.0})

    assert flat(batch, "advantages") == pytest.approx([1, 1, -1, -1])
    assert batch.metrics["critic/reward_clip_frac"] == 0.5


def test_gigpo_reports_how_many_turns_began_alike(make_trajectory: Maker) -> None:
    group = [make_trajectory("a", episode, float(episode), turns=[(1, 1), (1, 1)]) for episode in range(3)]
    for trajectory in group:
        trajectory.turns[0].observation_digest = b"start"
    batch = prepared([group], {"advantage": "gigpo", "gamma": 0.95})

    assert batch.metrics["system/state_batch_size/max"] == 3
    assert batch.metrics["system/state_batch_size/min"] == 1
    assert flat(batch, "advantages") == pytest.approx([-2, -1, 0, 0, 2, 1], rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimators_of_the_divergence_against_loops(estimator: str) -> None:
    logprobs, reference = [-1.0, -2.0, -0.1], [-1.5, -0.5, -0.1]
    plain = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}[estimator]

    found = divergence(estimator, np.array(logprobs), np.array(reference))

    expected = [plain(a - b) for a, b in zip(logprobs, reference, strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert np.isfinite(divergence(estimator, np.array([-900.0]), np.array([-1.0]))).all()


def test_the_coefficient_follows_the_divergence() -> None:
    section = KlSection(coefficient=0.1, target=0.5, horizon=100)

    assert next_coefficient(0.1, 0.55, 10, section) == pytest.approx(0.1 * (1 + 0.1 * 10 / 100))
    assert next_coefficient(0.1, 9.0, 10, section) == pytest.approx(0.1 * (1 + 0.2 * 10 / 100))
    assert next_coefficient(0.1, 0.0, 10, section) == pytest.approx(0.1 * (1 - 0.2 * 10 / 100))
    assert next_coefficient(0.1, 9.0, 10, KlSection(coefficient=0.1)) == 0.1
    assert next_coefficient(0.1, 0.0, 1000, section) == 0


def test_a_steered_coefficient_brings_the_divergence_to_its_target() -> None:
    """With a policy whose divergence is inversely proportional to the coefficient."""
    section, coefficient = KlSection(coefficient=0.01, target=0.5, horizon=64), 0.01
    for _ in range(200):
        coefficient = next_coefficient(coefficient, 0.1 / coefficient, 16, section)
    assert coefficient == pytest.approx(0.2, rel=1e-3)
