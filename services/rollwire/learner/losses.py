"""The objective: policy losses by name, aggregation as weights per token, entropy bonus, metrics.

Tensors are flat over the trained tokens of a micro-batch (suffix N). An aggregation is nothing but a weight per token,
computed once for a whole optimizer step, so that the loss of the step is a plain sum over micro-batches however it is
divided. docs/algorithms.md gives all formulas with their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_LOG_RATIO: Final = 20.0
"""Log-ratios are clamped to ± this before `exp`: overflow would turn the zero gradient of a clipped token into NaN."""


class Aggregation(StrEnum):
    """How per-token losses become one number."""

    TOKEN_MEAN = auto()
    SEQUENCE_MEAN_TOKEN_MEAN = auto()
    SEQUENCE_MEAN_TOKEN_SUM = auto()


@dataclass(frozen=True)
class LossSettings:
    """The objective of a step; ranges as in `rollwire.v1.LossSettings`.

    Attributes:
        policy_loss: Key of `POLICY_LOSSES`.
        clip_low: The ratio is clipped below at 1 - this.
        clip_high: The ratio is clipped above at 1 + this.
        entropy_coefficient: Coefficient of the entropy bonus.
        aggregation: How per-token losses become one number.
        temperature: Divisor of the logits.
        recompute_old_logprobs: Old log-probabilities come from the learner instead of the engine.
    """

    policy_loss: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    entropy_coefficient: float = 0.0
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    temperature: float = 1.0
    recompute_old_logprobs: bool = False


@dataclass(frozen=True)
class TokenTerms:
    """What a policy loss sees of N tokens, all float32[N].

    Attributes:
        log_ratio: Log-probability now minus the old one; carries the gradient.
        logprobs: Log-probability now; carries the gradient.
        advantages: Advantage of each token.
    """

    log_ratio: Tensor
    logprobs: Tensor
    advantages: Tensor


PolicyLoss = Callable[[TokenTerms, LossSettings], Tensor]
"""Maps the terms to a loss per token, float32[N]."""


def ppo_clip(terms: TokenTerms, settings: LossSettings) -> Tensor:
    """Clipped surrogate with separate clip ranges: -min(ρA, clip(ρ, 1 - clip_low, 1 + clip_high)·A).

    Schulman et al. 2017 (arXiv 1707.06347, eq. 7); separate ranges as in DAPO (arXiv 2503.14476, sec. 3.1).
    """
    ratio = terms.log_ratio.exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -torch.minimum(ratio * terms.advantages, clipped * terms.advantages)


POLICY_LOSSES: Final[Mapping[str, PolicyLoss]] = {"ppo_clip": ppo_clip}


def sample_weights(aggregation: Aggregation, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Returns the weight that each token of a sample has in the loss of an optimizer step.

    Args:
        aggregation: How per-token losses become one number.
        tokens: Trained tokens of every sample of the optimizer step, each >= 1.

    Returns:
        float64[samples]. With S samples of n_i tokens: 1 / Σn for token_mean, 1 / (S·n_i) for
        sequence_mean_token_mean, 1 / S for sequence_mean_token_sum.
    """
    counts = np.asarray(tokens, dtype=np.float64)
    if aggregation is Aggregation.TOKEN_MEAN:
        return np.full(len(counts), 1 / counts.sum())
    if aggregation is Aggregation.SEQUENCE_MEAN_TOKEN_MEAN:
        return 1 / (len(counts) * counts)
    return np.full(len(counts), 1 / len(counts))


@dataclass(frozen=True)
class MicroBatchTargets:
    """What the loss needs beside the model's output, all float32[N].

    Attributes:
        advantages: Advantage of each token.
        old_logprobs: Log-probabilities that the ratio is taken against.
        weights: Weight of each token in the loss of the optimizer step.
    """

    advantages: Tensor
    old_logprobs: Tensor
    weights: Tensor


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
    log_ratio = (logprobs_N - targets.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    terms = TokenTerms(log_ratio, logprobs_N, targets.advantages)
    policy_N = POLICY_LOSSES[settings.policy_loss](terms, settings)
    policy_loss = (policy_N * targets.weights).sum()
    entropy = (entropies_N * targets.weights).sum()
    loss = policy_loss - settings.entropy_coefficient * entropy
    with torch.no_grad():
        metrics = {
            "actor/pg_loss": policy_loss.detach(),
            "actor/entropy_loss": entropy.detach(),
            "actor/total_loss": loss.detach(),
            "critic/entropy/mean": entropies_N.sum() / step_tokens,
            **_ratio_metrics(log_ratio, targets, settings, step_tokens),
        }
    return loss, metrics


def _ratio_metrics(
    log_ratio_N: Tensor, targets: MicroBatchTargets, settings: LossSettings, step_tokens: int
) -> dict[str, Tensor]:
    """Returns how far the policy has moved from the old one; names and definitions are ROLL's."""
    ratio = log_ratio_N.exp()
    high, low = ratio > 1 + settings.clip_high, ratio < 1 - settings.clip_low
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return {
        "actor/ppo_ratio_high_clipfrac": high.sum() / step_tokens,
        "actor/ppo_ratio_low_clipfrac": low.sum() / step_tokens,
        "actor/ppo_ratio_clipfrac": (high | low).sum() / step_tokens,
        "actor/clipfrac": (clipped * targets.advantages < ratio * targets.advantages).sum() / step_tokens,
        "actor/ratio_mean": ratio.sum() / step_tokens,
        "actor/ratio_max": ratio.max(),
        "actor/ratio_min": ratio.min(),
        "actor/approxkl": (0.5 * log_ratio_N.square() * targets.weights).sum(),
        "actor/policykl": (log_ratio_N * targets.weights).sum(),
    }
