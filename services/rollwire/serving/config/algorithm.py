"""The section `algorithm`: advantages and objective, and which settings go together."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from rollwire.serving.config.sections import NotNegative, Positive, Section

RatioLevel = Literal["token", "sequence", "sequence_mean", "segment_mean"]
NotNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]

COMPARING: Final = ("grpo", "dr_grpo", "rloo", "gigpo")
"""Estimators that compare the episodes of a group and need at least two."""

DISCOUNTING: Final = ("reinforce_plus_plus", "step_reinforce", "gigpo", "gae")
"""Estimators that read `gamma`."""

CLIPPING: Final = ("ppo_clip", "gspo", "gspo_segment", "cispo")
"""Policy losses that read `clip_low` and `clip_high`."""

DUAL_CLIPPING: Final = ("ppo_clip", "gspo", "gspo_segment")
"""Policy losses that read `dual_clip`."""


class KlSection(Section):
    """Divergence of the policy to a reference that is never trained."""

    coefficient: NotNegativeFloat = 0.0
    """Its coefficient; 0 is off, and no reference is loaded. With `target` the coefficient to start from."""

    apply_to: Literal["loss", "reward"] = "loss"
    """Add it to the loss, or subtract it from the reward of every token."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """How it is estimated from the sampled tokens; k1 or k3 in the reward, k2 or k3 in the loss, see
    docs/algorithms.md."""

    target: NotNegativeFloat = 0.0
    """Divergence per token that the coefficient is steered to; 0 keeps it fixed."""

    horizon: Positive = 10_000
    """Episodes over which the coefficient follows."""

    @model_validator(mode="after")
    def _kl(self) -> KlSection:
        if self.target > 0 and self.coefficient == 0:
            raise ValueError(
                f"algorithm.kl.target is {self.target}, but algorithm.kl.coefficient is 0: nothing can be steered; "
                "set the coefficient to start from, such as 0.05"
            )
        if self.coefficient > 0 and self.apply_to == "loss" and self.estimator == "k1":
            raise ValueError(
                "algorithm.kl.estimator is k1 with algorithm.kl.apply_to=loss: the expected gradient of k1 is zero; "
                "choose k2 or k3, or algorithm.kl.apply_to=reward"
            )
        return self


class ImportanceWeightSection(Section):
    """Importance weight of the policy loss between engine and learner."""

    level: Literal["none", "token", "sequence", "sequence_mean", "segment_mean"] = "none"
    """Over what the ratio is taken; `none` is off."""

    upper_bound: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    """The weight is the ratio, at most this."""


class ImportanceMaskSection(Section):
    """Leaves tokens out of the policy loss whose ratio between engine and learner is out of range."""

    level: RatioLevel
    """Over what the ratio is taken."""

    min_ratio: NotNegativeFloat = 0.0
    """Least ratio."""

    max_ratio: NotNegativeFloat = 0.0
    """Greatest ratio; 0 is no bound."""

    @model_validator(mode="after")
    def _range(self) -> ImportanceMaskSection:
        if 0 < self.max_ratio < self.min_ratio:
            raise ValueError(
                f"an entry of algorithm.importance_masks has max_ratio {self.max_ratio} below min_ratio "
                f"{self.min_ratio}; allowed: max_ratio >= min_ratio, or 0 for no bound"
            )
        return self


class AlgorithmSection(Section):
    """Advantages and objective."""

    advantage: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce", "reinforce_plus_plus", "step_reinforce", "gigpo", "gae"
    ] = "grpo"
    """Advantage estimator; docs/algorithms.md gives the formulas. `gae` trains a critic as well."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount: per token with `gae` and `reinforce_plus_plus`, per turn with `gigpo` and `step_reinforce`. The others
    have none."""

    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """λ of `gae`, per token."""

    step_advantage_weight: NotNegativeFloat = 1.0
    """Weight of the turn's part in the advantage of `gigpo`."""

    reward_clip: NotNegativeFloat = 0.0
    """The reward of every turn is clipped to within ± this before anything is computed from it; 0 is off."""

    whiten_advantages: bool = False
    """Shift and scale advantages to mean 0 and variance 1 over all trained tokens of the step."""

    advantage_clip: NotNegativeFloat = 0.0
    """Advantages are clipped to within ± this, after whitening; 0 is off."""

    filter_zero_variance: bool = True
    """Leave groups out of the batch whose advantages are all zero, as of equal scores with `grpo`. Never done with
    `gae`, for the critic learns from every group."""

    kl: KlSection = KlSection()
    """Divergence to a reference."""

    policy_loss: Literal["ppo_clip", "gspo", "gspo_segment", "cispo", "topr", "topr_token", "policy_gradient"] = (
        "ppo_clip"
    )
    """Policy loss."""

    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Ratio clipped below at 1 - this."""

    clip_high: NotNegativeFloat = 0.2
    """Ratio clipped above at 1 + this."""

    dual_clip: NotNegativeFloat = 0.0
    """Where the advantage is negative the loss is at most this many times its size; > 1, or 0 for off."""

    value_clip: NotNegativeFloat = 0.0
    """The critic's prediction is clipped to within ± this of the one before the step; 0 is off."""

    entropy_coefficient: NotNegativeFloat = 0.0
    """Coefficient of the entropy bonus."""

    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed_length"] = (
        "token_mean"
    )
    """How per-token losses become one number."""

    fixed_length_tokens: NotNegative = 0
    """Length that the aggregation `fixed_length` divides by; 0 with the others."""

    recompute_old_logprobs: bool = False
    """Take old log-probabilities from the learner instead of the engine."""

    importance_weight: ImportanceWeightSection = ImportanceWeightSection()
    """Weight of the policy loss between engine and learner; needs `recompute_old_logprobs`."""

    importance_masks: list[ImportanceMaskSection] = Field(default=[])
    """Masks of the policy loss between engine and learner; need `recompute_old_logprobs`."""

    max_logprob_gap: Literal["auto"] | NotNegativeFloat = "auto"
    """Largest difference, in nats and as the mean over a step's tokens, between the log-probabilities that engine and
    learner give tokens of the learner's present weights; a larger one ends the run. `auto` chooses by device and
    element type, docs/metrics.md says what; 0 is off."""

    @model_validator(mode="after")
    def _advantages(self) -> AlgorithmSection:
        unread = {
            "gamma": (self.gamma != 1, DISCOUNTING),
            "gae_lambda": (self.gae_lambda != 0.95, ("gae",)),
            "value_clip": (self.value_clip != 0, ("gae",)),
            "step_advantage_weight": (self.step_advantage_weight != 1, ("gigpo",)),
        }
        self._refuse_unread("advantage", unread)
        return self

    @model_validator(mode="after")
    def _objective(self) -> AlgorithmSection:
        unread = {
            "clip_low": (self.clip_low != 0.2, CLIPPING),
            "clip_high": (self.clip_high != 0.2, CLIPPING),
            "dual_clip": (self.dual_clip != 0, DUAL_CLIPPING),
        }
        self._refuse_unread("policy_loss", unread)
        self._refuse_unread("aggregation", {"fixed_length_tokens": (self.fixed_length_tokens != 0, ("fixed_length",))})
        if self.aggregation == "fixed_length" and self.fixed_length_tokens == 0:
            raise ValueError(
                "algorithm.fixed_length_tokens is 0, but algorithm.aggregation=fixed_length divides by it; set it, "
                "such as to the longest response"
            )
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"algorithm.dual_clip is {self.dual_clip}; allowed: > 1, such as 3, or 0 for off")
        corrected = self.importance_weight.level != "none" or self.importance_masks
        if corrected and not self.recompute_old_logprobs:
            raise ValueError(
                "algorithm.importance_weight and algorithm.importance_masks compare the engine's log-probabilities "
                "with the learner's own; set algorithm.recompute_old_logprobs=true"
            )
        return self

    def _refuse_unread(self, choice: str, settings: dict[str, tuple[bool, tuple[str, ...]]]) -> None:
        """Refuses settings that are set but that the choice does not read, instead of ignoring them."""
        for name, (is_set, readers) in settings.items():
            if is_set and getattr(self, choice) not in readers:
                raise ValueError(
                    f"algorithm.{name} is {getattr(self, name)}, but algorithm.{choice}={getattr(self, choice)} does "
                    f"not read it; remove it, or choose {' or '.join(readers)}"
                )
