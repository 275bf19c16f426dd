"""Runs with a critic or a reference: what the coordinator asks, what it sends, what it does when scoring fails."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from rollwire.coordinator.divergence import next_coefficient
from rollwire.coordinator.errors import RunError
from rollwire.rpc.errors import Reason, RollwireError, invalid_field
from rollwire.serving.config.algorithm import KlSection
from rollwire.v1 import learner_pb2

REFERENCE, CRITIC = learner_pb2.SCORED_MODEL_REFERENCE, learner_pb2.SCORED_MODEL_CRITIC
GAE = ("algorithm.advantage=gae", "algorithm.gae_lambda=1")


def metrics_of_steps(world: Any) -> list[dict[str, float]]:
    with sqlite3.connect(world.run_dir.path / "run.db") as connection:
        return [json.loads(row[0]) for row in connection.execute("SELECT metrics FROM steps ORDER BY step")]


def trained(samples: list[learner_pb2.TrainSample], name: str) -> list[float]:
    """Returns a field at the last position of each sample, which is trained."""
    return [getattr(sample, name)[-1] for sample in samples]


def raises_at(error: Exception, *calls: int) -> Callable[[], None]:
    """Returns what raises an error at some of its calls, counted from 1."""
    count = 0

    def call() -> None:
        nonlocal count
        count += 1
        if count in calls:
            raise error

    return call


async def test_gae_asks_the_critic_before_every_step_and_trains_it(world: Any) -> None:
    world.learner.models.append(CRITIC)
    await world.run(*GAE, "algorithm.value_clip=0.2", "learner.critic.warmup_steps=1")

    assert world.learner.scored_models == [CRITIC] * 3
    headers = [header for header, _ in world.learner.steps]
    assert [(header.train_critic, header.freeze_policy) for header in headers] == [
        (True, True),
        (True, False),
        (True, False),
    ]
    assert headers[0].loss.value_clip == 0.2
    for _, samples in world.learner.steps:
        # One turn of two tokens, worth 0 or 1 at its end; with λ = γ = 1 both tokens have the return of the episode.
        returns = trained(samples, "returns")
        assert set(returns) <= {0.0, 1.0}
        assert trained(samples, "advantages") == pytest.approx([value - 0.25 for value in returns])
        assert trained(samples, "values") == [0.25] * 4
    _, scalars = world.notes.steps[0]
    assert {"critic/values/mean", "critic/returns/max", "time/step_ref_log_probs_values_reward"} <= set(scalars)
    assert scalars["critic/rewards/mean"] == scalars["critic/score/mean"]


async def test_a_divergence_in_the_loss_with_a_steered_coefficient(world: Any) -> None:
    """The coefficient of a step follows from those before it, and the ledger holds what it follows from."""
    world.learner.models.append(REFERENCE)
    world.learner.scores_as = -1.5  # the episodes' log-probabilities are -1
    kl = ["algorithm.kl.coefficient=0.1", "algorithm.kl.target=0.01", "algorithm.kl.horizon=10"]
    await world.run(*kl)

    assert world.learner.scored_models == [REFERENCE] * 3
    section = KlSection(coefficient=0.1, target=0.01, horizon=10)
    measured = math.exp(-0.5) + 0.5 - 1
    expected = [0.1]
    for _ in range(2):
        expected.append(next_coefficient(expected[-1], measured, 4, section))
    assert [header.loss.kl_coefficient for header, _ in world.learner.steps] == pytest.approx(expected)
    assert expected[2] > expected[1] > expected[0]
    journalled = metrics_of_steps(world)
    assert [metrics["critic/kl_coef"] for metrics in journalled] == pytest.approx(expected)
    assert [metrics["critic/kl"] for metrics in journalled] == pytest.approx([measured] * 3)
    for header, samples in world.learner.steps:
        assert header.loss.kl_estimator == learner_pb2.KL_ESTIMATOR_K3
        assert trained(samples, "reference_logprobs") == [-1.5] * 4


async def test_a_divergence_in_the_reward_stays_with_the_coordinator(world: Any) -> None:
    world.learner.models.append(REFERENCE)
    world.learner.scores_as = -1.5
    reward = ["algorithm.kl={coefficient: 0.2, apply_to: reward, estimator: k1}"]
    await world.run(*reward, "algorithm.advantage=reinforce")

    for header, samples in world.learner.steps:
        assert header.loss.kl_coefficient == 0
        assert not any(sample.reference_logprobs for sample in samples)
        for sample in samples:
            assert sample.advantages[2] == pytest.approx(sample.advantages[3] - 0.2 * 0.5)
            assert sample.advantages[3] in (pytest.approx(0.9), pytest.approx(-0.1))


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("algorithm.advantage=gae", "algorithm.advantage=gae needs a critic, which the learner at .* does not have"),
        ("algorithm.kl.coefficient=0.1", "algorithm.kl.coefficient > 0 needs a reference"),
        ("algorithm.policy_loss=gspo", "algorithm.policy_loss is gspo, but the learner .* has only ppo_clip"),
    ],
)
async def test_a_learner_that_lacks_what_is_needed_ends_the_run_before_it_begins(
    override: str, text: str, world: Any
) -> None:
    with pytest.raises(RunError, match=text):
        await world.run(override)
    assert world.rollout.requests == []


async def test_scoring_is_asked_again_after_a_lost_connection(world: Any) -> None:
    world.learner.models.append(CRITIC)
    lost = RollwireError(grpc.StatusCode.UNAVAILABLE, Reason.DRAINING, "gone")
    world.learner.before_score = raises_at(lost, 1, 2, 4)
    await world.run(*GAE)

    assert len(world.learner.steps) == 3
    assert len(world.learner.scored_models) == 6
    assert [text for text in world.notes.notices if "was lost (gone)" in text]


async def test_a_learner_that_refuses_to_score_ends_the_run(world: Any) -> None:
    world.learner.models.append(CRITIC)
    world.learner.before_score = raises_at(invalid_field("samples", 1, "2"), 1)
    with pytest.raises(RunError, match=r"the learner at .* refused to score a batch"):
        await world.run(*GAE)
    assert world.learner.steps == []


@pytest.mark.parametrize(
    ("knob", "value", "text"),
    [
        ("left_out", 1, "gave 3 values for the sample g00000000.0.0, which has 4 tokens"),
        ("value", math.nan, "gave values for the sample g00000000.0.0 that are not finite"),
    ],
)
async def test_scores_that_cannot_be_used_end_the_run(knob: str, value: float, text: str, world: Any) -> None:
    world.learner.models.append(CRITIC)
    setattr(world.learner, knob, value)
    with pytest.raises(RunError, match=text):
        await world.run(*GAE)
    assert world.learner.steps == []
