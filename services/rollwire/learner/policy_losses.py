"""Policy losses by name: what each trained token contributes. docs/algorithms.md gives the formulas with their sources.

A new one is a function and a line in `POLICY_LOSSES`. Tensors are flat over trained tokens (suffix N).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from rollwire.learner.objective import LossSettings
from rollwire.learner.ratios import RatioLevel


@dataclass(frozen=True)
class TokenTerms:
    """What a policy loss sees of N tokens, all float32[N].

    Attributes:
        log_ratio: Log-ratio now to old at the loss's level, clamped; carries the gradient of the token's own.
        logprobs: Log-probability now; carries the gradient.
        advantages: Advantage of each token.
    """

    log_ratio: Tensor
    logprobs: Tensor
    advantages: Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """One entry of `POLICY_LOSSES`.

    Attributes:
        per_token: Maps the terms to a loss per token, float32[N].
        level: Over what the ratio is taken that it sees.
        clips: Whether it reads `clip_low` and `clip_high`.
        dual_clips: Whether it reads `dual_clip`.
    """

    per_token: Callable[[TokenTerms, LossSettings], Tensor]
    level: RatioLevel = RatioLevel.TOKEN
    clips: bool = False
    dual_clips: bool = False


def clipped_surrogate(terms: TokenTerms, settings: LossSettings) -> Tensor:
    """Clipped surrogate with separate clip ranges: -min(ρA, clip(ρ, 1 - clip_low, 1 + clip_high)·A).

    Schulman et al. 2017 (arXiv 1707.06347, eq. 7); separate ranges as in DAPO (arXiv 2503.14476, sec. 3.1). With
    `dual_clip` c the loss of a negative advantage is at most -cA (Ye et al. 2020, arXiv 1912.09729). With the ratio
    over a sample or a segment it is GSPO (Zheng et al. 2025, arXiv 2507.18071).
    """
    ratio = terms.log_ratio.exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss = -torch.minimum(ratio * terms.advantages, clipped * terms.advantages)
    if settings.dual_clip:
        bounded = torch.minimum(loss, -settings.dual_clip * terms.advantages)
        loss = torch.where(terms.advantages < 0, bounded, loss)
    return loss


def cispo(terms: TokenTerms, settings: LossSettings) -> Tensor:
    """Clipped importance weight without gradient: -sg(clip(ρ, 1 - clip_low, 1 + clip_high))·A·lp.

    MiniMax-M1 (arXiv 2506.13585). No token loses its gradient.
    """
    weight = terms.log_ratio.detach().exp().clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -weight * terms.advantages * terms.logprobs


def tapered(terms: TokenTerms, settings: LossSettings) -> Tensor:
    """Truncated importance weight where the advantage is negative, none elsewhere: -sg(w)·A·lp, w = 1 or min(ρ, 1).

    TOPR: Le Roux et al. 2025 (arXiv 2503.14286), with the ratio over the whole sample.
    """
    weight = torch.where(terms.advantages < 0, terms.log_ratio.detach().exp().clamp(max=1), 1.0)
    return -weight * terms.advantages * terms.logprobs


def policy_gradient(terms: TokenTerms, settings: LossSettings) -> Tensor:
    """Plain policy gradient without any ratio: -A·lp. Williams 1992."""
    return -terms.advantages * terms.logprobs


POLICY_LOSSES: Final[Mapping[str, PolicyLoss]] = {
    "ppo_clip": PolicyLoss(clipped_surrogate, clips=True, dual_clips=True),
    "gspo": PolicyLoss(clipped_surrogate, RatioLevel.SEQUENCE_MEAN, clips=True, dual_clips=True),
    "gspo_segment": PolicyLoss(clipped_surrogate, RatioLevel.SEGMENT_MEAN, clips=True, dual_clips=True),
    "cispo": PolicyLoss(cispo, clips=True),
    "topr": PolicyLoss(tapered, RatioLevel.SEQUENCE),
    "topr_token": PolicyLoss(tapered),
    "policy_gradient": PolicyLoss(policy_gradient),
}
