"""From `rollwire.v1.LossSettings` to the objective. Every field is checked, and none is ignored in silence."""

from __future__ import annotations

import math
from typing import Any, Final

from rollwire.learner.objective import Aggregation, ImportanceMask, ImportanceWeight, KlEstimator, LossSettings
from rollwire.learner.policy_losses import POLICY_LOSSES
from rollwire.learner.ratios import RatioLevel
from rollwire.rpc.errors import invalid_field
from rollwire.v1 import learner_pb2

MAX_TEMPERATURE: Final = 100.0
MAX_MASKS: Final = 16
"""Most importance masks of one step."""

_AGGREGATIONS: Final = {
    learner_pb2.LOSS_AGGREGATION_UNSPECIFIED: Aggregation.TOKEN_MEAN,
    learner_pb2.LOSS_AGGREGATION_TOKEN_MEAN: Aggregation.TOKEN_MEAN,
    learner_pb2.LOSS_AGGREGATION_SEQUENCE_MEAN_TOKEN_MEAN: Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
    learner_pb2.LOSS_AGGREGATION_SEQUENCE_MEAN_TOKEN_SUM: Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
    learner_pb2.LOSS_AGGREGATION_FIXED_LENGTH: Aggregation.FIXED_LENGTH,
}
_KL_ESTIMATORS: Final = {
    learner_pb2.KL_ESTIMATOR_UNSPECIFIED: KlEstimator.K3,
    learner_pb2.KL_ESTIMATOR_K1: KlEstimator.K1,
    learner_pb2.KL_ESTIMATOR_K2: KlEstimator.K2,
    learner_pb2.KL_ESTIMATOR_K3: KlEstimator.K3,
}
_LEVELS: Final = {
    learner_pb2.RATIO_LEVEL_TOKEN: RatioLevel.TOKEN,
    learner_pb2.RATIO_LEVEL_SEQUENCE: RatioLevel.SEQUENCE,
    learner_pb2.RATIO_LEVEL_SEQUENCE_MEAN: RatioLevel.SEQUENCE_MEAN,
    learner_pb2.RATIO_LEVEL_SEGMENT_MEAN: RatioLevel.SEGMENT_MEAN,
}


def parse_loss(path: str, loss: learner_pb2.LossSettings) -> LossSettings:
    """Checks the settings of an objective and returns them.

    Raises:
        RollwireError: INVALID_ARGUMENT / `INVALID_FIELD`: a value out of range, or one that the others leave unused.
    """
    name = loss.policy_loss or "ppo_clip"
    if name not in POLICY_LOSSES:
        raise invalid_field(f"{path}.policy_loss", name, f"one of {', '.join(POLICY_LOSSES)}, or empty for ppo_clip")
    _check_clips(path, name, loss)
    for field in ("entropy_coefficient", "kl_coefficient", "value_clip"):
        _check_not_negative(f"{path}.{field}", getattr(loss, field))
    aggregation = _choose(f"{path}.aggregation", loss.aggregation, _AGGREGATIONS, learner_pb2.LossAggregation)
    fixed = aggregation is Aggregation.FIXED_LENGTH
    if fixed != (loss.fixed_length_tokens > 0):
        allowed = "> 0 with LOSS_AGGREGATION_FIXED_LENGTH" if fixed else "0 unless with LOSS_AGGREGATION_FIXED_LENGTH"
        raise invalid_field(f"{path}.fixed_length_tokens", loss.fixed_length_tokens, allowed)
    return LossSettings(
        policy_loss=name,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        entropy_coefficient=loss.entropy_coefficient,
        aggregation=aggregation,
        temperature=parse_temperature(f"{path}.temperature", loss.temperature),
        recompute_old_logprobs=loss.recompute_old_logprobs,
        dual_clip=loss.dual_clip,
        kl_coefficient=loss.kl_coefficient,
        kl_estimator=_choose(f"{path}.kl_estimator", loss.kl_estimator, _KL_ESTIMATORS, learner_pb2.KlEstimator),
        fixed_length_tokens=loss.fixed_length_tokens,
        importance_weight=_parse_weight(path, loss),
        importance_masks=_parse_masks(path, loss),
        value_clip=loss.value_clip,
    )


def parse_temperature(path: str, value: float) -> float:
    """Returns a temperature; 0 means 1.

    Raises:
        RollwireError: INVALID_ARGUMENT / `INVALID_FIELD`.
    """
    if not 0 <= value <= MAX_TEMPERATURE:  # NaN fails too
        raise invalid_field(path, value, f"a number > 0 up to {MAX_TEMPERATURE:g}, or 0 for 1")
    return value or 1.0


def _check_clips(path: str, name: str, loss: learner_pb2.LossSettings) -> None:
    """Checks the clip ranges, and that the policy loss reads those that are set."""
    if not 0 <= loss.clip_low < 1:
        raise invalid_field(f"{path}.clip_low", loss.clip_low, "a number in [0, 1)")
    _check_not_negative(f"{path}.clip_high", loss.clip_high)
    if loss.dual_clip != 0 and not 1 < loss.dual_clip < math.inf:
        raise invalid_field(f"{path}.dual_clip", loss.dual_clip, "a finite number > 1, or 0 for off")
    kind = POLICY_LOSSES[name]
    for field, is_read in (("clip_low", kind.clips), ("clip_high", kind.clips), ("dual_clip", kind.dual_clips)):
        if getattr(loss, field) and not is_read:
            raise invalid_field(f"{path}.{field}", getattr(loss, field), f"0: the policy loss {name} does not read it")


def _parse_weight(path: str, loss: learner_pb2.LossSettings) -> ImportanceWeight | None:
    if not loss.HasField("importance_weight"):
        return None
    path, weight = f"{path}.importance_weight", loss.importance_weight
    _check_recomputed(path, loss)
    level = _choose(f"{path}.level", weight.level, _LEVELS, learner_pb2.RatioLevel)
    if not 0 < weight.upper_bound < math.inf:
        raise invalid_field(f"{path}.upper_bound", weight.upper_bound, "a finite number > 0")
    return ImportanceWeight(level, weight.upper_bound)


def _parse_masks(path: str, loss: learner_pb2.LossSettings) -> tuple[ImportanceMask, ...]:
    masks = []
    if len(loss.importance_masks) > MAX_MASKS:
        raise invalid_field(f"{path}.importance_masks", f"{len(loss.importance_masks)} masks", f"at most {MAX_MASKS}")
    for index, mask in enumerate(loss.importance_masks):
        here = f"{path}.importance_masks[{index}]"
        _check_recomputed(here, loss)
        level = _choose(f"{here}.level", mask.level, _LEVELS, learner_pb2.RatioLevel)
        _check_not_negative(f"{here}.min_ratio", mask.min_ratio)
        if mask.max_ratio != 0 and not mask.min_ratio <= mask.max_ratio < math.inf:
            raise invalid_field(f"{here}.max_ratio", mask.max_ratio, "a finite number >= min_ratio, or 0 for no bound")
        masks.append(ImportanceMask(level, mask.min_ratio, mask.max_ratio or math.inf))
    return tuple(masks)


def _check_recomputed(path: str, loss: learner_pb2.LossSettings) -> None:
    if not loss.recompute_old_logprobs:
        raise invalid_field(path, "set", "unset without recompute_old_logprobs, which gives the ratio's other side")


def _check_not_negative(path: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise invalid_field(path, value, "a finite number >= 0")


def _choose(path: str, value: int, known: dict[Any, Any], enum: Any) -> Any:
    """Returns what an enum value stands for; one that is not known is refused."""
    if value not in known:
        raise invalid_field(path, value, f"one of {', '.join(enum.Name(number) for number in known)}")
    return known[value]
