"""The policy's objective on a micro-batch: policy loss, entropy bonus, divergence to the reference, metrics.

Tensors are flat over the trained tokens of a micro-batch (suffix N). An aggregation is nothing but a weight per token,
computed once for a whole optimizer step, so that the loss of the step is a plain sum over micro-batches however it is
divided. docs/algorithms.md gives all formulas with their sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollwire.learner.objective import Aggregation, KlEstimator, LossSettings
from rollwire.learner.policy_losses import POLICY_LOSSES, TokenTerms
from rollwire.learner.ratios import MAX_LOG_RATIO, TokenSpans, level_log_ratio


def sample_weights(settings: LossSettings, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Returns the weight that each token of a sample has in the loss of an optimizer step.

    Args:
        settings: Says how per-token losses become one number.
        tokens: Trained tokens of every sample of the optimizer step, each >= 1.

    Returns:
        float64[samples]. With S samples of n_i tokens: 1 / Σn for token_mean, 1 / (S·n_i) for
        sequence_mean_token_mean, 1 / S for sequence_mean_token_sum, 1 / (S·fixed_length_tokens) for fixed_length.
    """
    counts = np.asarray(tokens, dtype=np.float64)
    if settings.aggregation is Aggregation.TOKEN_MEAN:
        return np.full(len(counts), 1 / counts.sum())
    if settings.aggregation is Aggregation.SEQUENCE_MEAN_TOKEN_MEAN:
        return 1 / (len(counts) * counts)
    if settings.aggregation is Aggregation.FIXED_LENGTH:
        return np.full(len(counts), 1 / (len(counts) * settings.fixed_length_tokens))
    return np.full(len(counts), 1 / len(counts))


@dataclass(frozen=True)
class MicroBatchTargets:
    """What the loss needs beside the model's output, float32[N] each.

    Attributes:
        advantages: Advantage of each token.
        old_logprobs: Log-probabilities that the ratio is taken against.
        weights: Weight of each token in the loss of the optimizer step.
        spans: Samples and segments of the tokens.
        importance: Factor of each token's policy loss; None means 1.
        reference_logprobs: Log-probabilities of the reference; needed with `kl_coefficient` alone.
    """

    advantages: Tensor
    old_logprobs: Tensor
    weights: Tensor
    spans: TokenSpans
    importance: Tensor | None = None
    reference_logprobs: Tensor | None = None


def divergence(estimator: KlEstimator, logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Returns the divergence of the policy to the reference at each token, with gradient.

    With d = lp - lp_ref: d (k1), d²/2 (k2), exp(-d) + d - 1 (k3); J. Schulman, "Approximating KL divergence", 2020.
    """
    d = logprobs_N - reference_N
    if estimator is KlEstimator.K1:
        return d
    if estimator is KlEstimator.K2:
        return 0.5 * d.square()
    # Beyond the bound there is no gradient: that of the second term alone would point away from the reference.
    bounded = d.clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-bounded) + bounded


def micro_batch_loss(
    logprobs_N: Tensor, entropies_N: Tensor, targets: MicroBatchTargets, settings: LossSettings, step_tokens: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns this micro-batch's part of the optimizer step's loss, and its part of the metrics.

    Args:
        logprobs_N: Log-probabilities under the present weights, with gradient.
        entropies_N: Entropies in nats; with gradient if `settings.entropy_coefficient` is positive.
        targets: Advantages, old log-probabilities and weights.
        settings: The objective.
        step_tokens: Trained tokens of the whole optimizer step.

    Returns:
        The loss (scalar), and metrics by name (scalars without gradient). Over the micro-batches of an optimizer step
        metrics add up, except names that end in `_max` or `_min`.
    """
    kind = POLICY_LOSSES[settings.policy_loss]
    raw_N = logprobs_N - targets.old_logprobs
    log_ratio = level_log_ratio(kind.level, raw_N, targets.spans)
    policy_N = kind.per_token(TokenTerms(log_ratio, logprobs_N, targets.advantages), settings)
    if targets.importance is not None:
        policy_N = policy_N * targets.importance
    policy_loss = (policy_N * targets.weights).sum()
    entropy = (entropies_N * targets.weights).sum()
    loss = policy_loss - settings.entropy_coefficient * entropy
    metrics = {"actor/pg_loss": policy_loss.detach(), "actor/entropy_loss": entropy.detach()}
    if settings.kl_coefficient > 0:
        assert targets.reference_logprobs is not None, "a request without them is refused"
        kl_N = divergence(settings.kl_estimator, logprobs_N, targets.reference_logprobs)
        kl_loss = (kl_N * targets.weights).sum()
        loss = loss + settings.kl_coefficient * kl_loss
        metrics["actor/kl_loss"] = kl_loss.detach()
    with torch.no_grad():
        metrics |= {
            "actor/total_loss": loss.detach(),
            "critic/entropy/mean": entropies_N.sum() / step_tokens,
            "actor/approxkl": (0.5 * raw_N.square() * targets.weights).sum(),
            "actor/policykl": (raw_N * targets.weights).sum(),
            **_ratio_metrics(log_ratio, targets.advantages, settings, step_tokens),
        }
    return loss, metrics


def _ratio_metrics(
    log_ratio_N: Tensor, advantages_N: Tensor, settings: LossSettings, step_tokens: int
) -> dict[str, Tensor]:
    """Returns how far the policy has moved from the old one, at the loss's level; names are ROLL's."""
    ratio = log_ratio_N.exp()
    metrics = {
        "actor/ratio_mean": ratio.sum() / step_tokens,
        "actor/ratio_max": ratio.max(),
        "actor/ratio_min": ratio.min(),
    }
    if not POLICY_LOSSES[settings.policy_loss].clips:
        return metrics
    high, low = ratio > 1 + settings.clip_high, ratio < 1 - settings.clip_low
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    metrics |= {
        "actor/ppo_ratio_high_clipfrac": high.sum() / step_tokens,
        "actor/ppo_ratio_low_clipfrac": low.sum() / step_tokens,
        "actor/ppo_ratio_clipfrac": (high | low).sum() / step_tokens,
        "actor/clipfrac": (clipped * advantages_N < ratio * advantages_N).sum() / step_tokens,
    }
    if settings.dual_clip:
        bounded = (advantages_N < 0) & (ratio > settings.dual_clip)
        metrics["actor/dual_clipfrac"] = bounded.sum() / step_tokens
    return metrics
