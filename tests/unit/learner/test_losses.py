"""Policy losses and aggregation on numbers small enough to check by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rollwire.learner.losses import MicroBatchTargets, divergence, micro_batch_loss, sample_weights
from rollwire.learner.objective import Aggregation, KlEstimator, LossSettings
from rollwire.learner.policy_losses import POLICY_LOSSES, TokenTerms, clipped_surrogate
from rollwire.learner.ratios import TokenSpans

SETTINGS = LossSettings(clip_low=0.2, clip_high=0.3)


def one_sample(count: int) -> TokenSpans:
    """Returns the spans of one sample whose tokens form one segment."""
    return TokenSpans(torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64), 1, 1)


def token_loss(ratio: float, advantage: float) -> tuple[float, float]:
    """Returns the loss of one token and its gradient with respect to the log-probability."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = clipped_surrogate(TokenTerms(logprob, logprob, torch.tensor([advantage])), SETTINGS)
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
    def weights(aggregation: Aggregation) -> list[float]:
        found: list[float] = sample_weights(
            LossSettings(aggregation=aggregation, fixed_length_tokens=10), [2, 6]
        ).tolist()
        return found

    assert weights(Aggregation.TOKEN_MEAN) == pytest.approx([1 / 8, 1 / 8])
    assert weights(Aggregation.SEQUENCE_MEAN_TOKEN_MEAN) == pytest.approx([1 / 4, 1 / 12])
    assert weights(Aggregation.SEQUENCE_MEAN_TOKEN_SUM) == pytest.approx([1 / 2, 1 / 2])
    assert weights(Aggregation.FIXED_LENGTH) == pytest.approx([1 / 20, 1 / 20])


def one_micro_batch(ratios: list[float], advantages: list[float]) -> tuple[Tensor, dict[str, Tensor]]:
    count = len(ratios)
    targets = MicroBatchTargets(
        torch.tensor(advantages), torch.zeros(count), torch.full((count,), 1 / count), one_sample(count)
    )
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
    targets = MicroBatchTargets(torch.zeros(2), torch.zeros(2), torch.full((2,), 0.5), one_sample(2))

    loss, metrics = micro_batch_loss(torch.zeros(2), torch.tensor([1.0, 3.0]), targets, settings, step_tokens=2)

    assert loss.item() == pytest.approx(-1.0)
    assert metrics["actor/entropy_loss"].item() == pytest.approx(2.0)
    assert metrics["critic/entropy/mean"].item() == pytest.approx(2.0)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_extreme_ratios_leave_the_gradient_finite(name: str) -> None:
    settings = LossSettings(policy_loss=name, kl_coefficient=0.1)
    logprobs = torch.tensor([-1.0, -1.0, -200.0, -200.0], requires_grad=True)
    old = torch.tensor([-200.0, -200.0, -1.0, -1.0])
    targets = MicroBatchTargets(
        torch.tensor([1.0, -1.0, 1.0, -1.0]), old, torch.full((4,), 0.25), one_sample(4), None, old
    )

    loss, _ = micro_batch_loss(logprobs, torch.zeros(4), targets, settings, step_tokens=4)

    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.isfinite() and gradient.isfinite().all()


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    settings = LossSettings(dual_clip=3.0)
    logprobs = torch.tensor([5.0, 2.0, 5.0]).log().requires_grad_()
    advantages = torch.tensor([-1.0, -1.0, 1.0])

    losses = clipped_surrogate(TokenTerms(logprobs, logprobs, advantages), settings)

    assert losses.tolist() == pytest.approx([3.0, 2.0, -1.2])
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([0.0, 2.0, 0.0])


@pytest.mark.parametrize("estimator", list(KlEstimator))
@pytest.mark.parametrize("d", [-60.0, -21.0, -19.0, -1.0, 1.0, 30.0])
def test_no_divergence_pushes_a_token_away_from_the_reference(estimator: KlEstimator, d: float) -> None:
    logprob = torch.tensor([d], requires_grad=True)
    value = divergence(estimator, logprob, torch.zeros(1))
    gradient = torch.autograd.grad(value.sum(), logprob)[0].item()
    assert value.isfinite()
    if estimator is KlEstimator.K1:
        assert gradient == 1
    else:
        assert gradient * d >= 0
        assert gradient != 0 or d < -20


@pytest.mark.parametrize("estimator", list(KlEstimator))
def test_the_mean_of_every_estimator_but_k2_is_the_divergence(estimator: KlEstimator) -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.45, 0.35, 0.2], dtype=torch.float64)

    mean = (policy * divergence(estimator, policy.log(), reference.log())).sum().item()

    exact = sum(p * math.log(p / q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
    assert mean == pytest.approx(exact, rel=0.05 if estimator is KlEstimator.K2 else 1e-9)


def test_gradients_of_the_estimators_are_those_of_the_two_divergences_and_that_of_k1_vanishes() -> None:
    """In expectation over what the policy draws, with the sampled tokens held fixed."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.45, 0.35, 0.2], dtype=torch.float64).log()
    logp = logits.log_softmax(0)
    drawn = logp.exp().detach()

    def expected_gradient(estimator: KlEstimator) -> list[float]:
        loss = (drawn * divergence(estimator, logp, reference)).sum()
        found: list[float] = torch.autograd.grad(loss, logits, retain_graph=True)[0].tolist()
        return found

    reverse = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)[0].tolist()
    forward = torch.autograd.grad((reference.exp() * (reference - logp)).sum(), logits, retain_graph=True)[0].tolist()
    assert expected_gradient(KlEstimator.K2) == pytest.approx(reverse, abs=1e-12)
    assert expected_gradient(KlEstimator.K3) == pytest.approx(forward, abs=1e-12)
    assert expected_gradient(KlEstimator.K1) == pytest.approx([0, 0, 0], abs=1e-12)
