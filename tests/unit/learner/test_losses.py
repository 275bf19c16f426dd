"""Policy losses and aggregation on numbers small enough to check by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rollwire.learner.losses import (
    POLICY_LOSSES,
    Aggregation,
    LossSettings,
    MicroBatchTargets,
    TokenTerms,
    micro_batch_loss,
    ppo_clip,
    sample_weights,
)

SETTINGS = LossSettings(clip_low=0.2, clip_high=0.3)


def token_loss(ratio: float, advantage: float) -> tuple[float, float]:
    """Returns the loss of one token and its gradient with respect to the log-probability."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = ppo_clip(TokenTerms(logprob, logprob, torch.tensor([advantage])), SETTINGS)
    (gradient,) = torch.autograd.grad(loss.sum(), logprob)
    return loss.item(), gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: the plain policy gradient
        (1.25, 2.0, -2.5, -2.5),  # inside the upper range
        (1.5, 2.0, -2.6, 0.0),  # a good token that became likely enough
        (0.5, 2.0, -1.0, -1.0),  # a good token that became unlikely is pulled back
        (0.5, -2.0, 1.6, 0.0),  # a bad token that became unlikely enough
        (1.5, -2.0, 3.0, 3.0),  # a bad token that became likely is pushed down
    ],
)
def test_ppo_clip(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert token_loss(ratio, advantage) == pytest.approx((loss, gradient), rel=1e-5)


def test_weights_give_every_aggregation() -> None:
    tokens = [2, 6]

    assert sample_weights(Aggregation.TOKEN_MEAN, tokens).tolist() == pytest.approx([1 / 8, 1 / 8])
    assert sample_weights(Aggregation.SEQUENCE_MEAN_TOKEN_MEAN, tokens).tolist() == pytest.approx([1 / 4, 1 / 12])
    assert sample_weights(Aggregation.SEQUENCE_MEAN_TOKEN_SUM, tokens).tolist() == pytest.approx([1 / 2, 1 / 2])


def one_micro_batch(ratios: list[float], advantages: list[float]) -> tuple[Tensor, dict[str, Tensor]]:
    count = len(ratios)
    targets = MicroBatchTargets(torch.tensor(advantages), torch.zeros(count), torch.full((count,), 1 / count))
    logprobs = torch.tensor(ratios).log()
    return micro_batch_loss(logprobs, torch.full((count,), 0.7), targets, SETTINGS, step_tokens=count)


def test_metrics_count_what_lies_outside_the_clip_range() -> None:
    loss, metrics = one_micro_batch([1.0, 1.5, 0.5, 1.4], [1.0, 1.0, 1.0, -1.0])

    found = {name: value.item() for name, value in metrics.items()}
    assert found["actor/ppo_ratio_high_clipfrac"] == pytest.approx(0.5)
    assert found["actor/ppo_ratio_low_clipfrac"] == pytest.approx(0.25)
    assert found["actor/ppo_ratio_clipfrac"] == pytest.approx(0.75)
    assert found["actor/clipfrac"] == pytest.approx(0.25)  # only the second token's gradient is cut
    assert found["actor/ratio_mean"] == pytest.approx(1.1)
    assert found["actor/ratio_max"] == pytest.approx(1.5)
    assert found["actor/ratio_min"] == pytest.approx(0.5)
    deltas = [math.log(ratio) for ratio in (1.0, 1.5, 0.5, 1.4)]
    assert found["actor/policykl"] == pytest.approx(sum(deltas) / 4, rel=1e-5)
    assert found["actor/approxkl"] == pytest.approx(sum(delta**2 for delta in deltas) / 8, rel=1e-5)
    assert found["actor/pg_loss"] == pytest.approx((-1.0 - 1.3 - 0.5 + 1.4) / 4)
    assert found["actor/total_loss"] == pytest.approx(loss.item())


def test_entropy_bonus_lowers_the_loss() -> None:
    settings = LossSettings(entropy_coefficient=0.5)
    targets = MicroBatchTargets(torch.zeros(2), torch.zeros(2), torch.full((2,), 0.5))

    loss, metrics = micro_batch_loss(torch.zeros(2), torch.tensor([1.0, 3.0]), targets, settings, step_tokens=2)

    assert loss.item() == pytest.approx(-1.0)
    assert metrics["actor/entropy_loss"].item() == pytest.approx(2.0)
    assert metrics["critic/entropy/mean"].item() == pytest.approx(2.0)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_extreme_ratios_leave_the_gradient_finite(name: str) -> None:
    settings = LossSettings(policy_loss=name)
    logprobs = torch.tensor([-1.0, -1.0, -200.0, -200.0], requires_grad=True)
    old = torch.tensor([-200.0, -200.0, -1.0, -1.0])
    targets = MicroBatchTargets(torch.tensor([1.0, -1.0, 1.0, -1.0]), old, torch.full((4,), 0.25))

    loss, _ = micro_batch_loss(logprobs, torch.zeros(4), targets, settings, step_tokens=4)

    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.isfinite() and gradient.isfinite().all()
