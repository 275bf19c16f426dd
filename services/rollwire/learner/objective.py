"""What a training step minimises, as settings; the terms are in `policy_losses`, `losses` and `critic`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto

from rollwire.learner.ratios import RatioLevel


class Aggregation(StrEnum):
    """How per-token losses become one number."""

    TOKEN_MEAN = auto()
    SEQUENCE_MEAN_TOKEN_MEAN = auto()
    SEQUENCE_MEAN_TOKEN_SUM = auto()
    FIXED_LENGTH = auto()


class KlEstimator(StrEnum):
    """How the divergence to the reference is estimated from the sampled tokens."""

    K1 = auto()
    K2 = auto()
    K3 = auto()


@dataclass(frozen=True)
class ImportanceWeight:
    """Factor min(ratio, upper_bound) of the policy loss, without gradient; the ratio is old policy to behaviour policy.

    Attributes:
        level: Over what the ratio is taken.
        upper_bound: Bound of the factor, > 0.
    """

    level: RatioLevel
    upper_bound: float


@dataclass(frozen=True)
class ImportanceMask:
    """Leaves tokens out of the policy loss whose ratio lies outside [min_ratio, max_ratio].

    Attributes:
        level: Over what the ratio is taken.
        min_ratio: >= 0.
        max_ratio: >= `min_ratio`; infinite means no bound.
    """

    level: RatioLevel
    min_ratio: float
    max_ratio: float


@dataclass(frozen=True)
class LossSettings:
    """The objective of a step; ranges as in `rollwire.v1.LossSettings`.

    Attributes:
        policy_loss: Key of `policy_losses.POLICY_LOSSES`.
        clip_low: The ratio is clipped below at 1 - this.
        clip_high: The ratio is clipped above at 1 + this.
        entropy_coefficient: Coefficient of the entropy bonus.
        aggregation: How per-token losses become one number.
        temperature: Divisor of the logits.
        recompute_old_logprobs: Old log-probabilities come from the learner instead of the engine.
        dual_clip: Bound of a token's loss where the advantage is negative, in multiples of its size; 0 is off.
        kl_coefficient: Coefficient of the divergence to the reference.
        kl_estimator: How that divergence is estimated.
        fixed_length_tokens: Length that `Aggregation.FIXED_LENGTH` divides by; 0 for the others.
        importance_weight: Weight between engine and learner; None means 1.
        importance_masks: Masks between engine and learner, all of which must let a token pass.
        value_clip: The critic's prediction is clipped to within this of the one before the step; 0 is off.
    """

    policy_loss: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    entropy_coefficient: float = 0.0
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    temperature: float = 1.0
    recompute_old_logprobs: bool = False
    dual_clip: float = 0.0
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = KlEstimator.K3
    fixed_length_tokens: int = 0
    importance_weight: ImportanceWeight | None = None
    importance_masks: tuple[ImportanceMask, ...] = ()
    value_clip: float = 0.0
