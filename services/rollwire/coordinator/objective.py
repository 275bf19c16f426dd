"""The objective that the learner is sent, as the configuration states it. Pure."""

from __future__ import annotations

from typing import Final

from rollwire.serving.config import RunConfig
from rollwire.serving.config.algorithm import CLIPPING, AlgorithmSection
from rollwire.v1 import learner_pb2

AGGREGATIONS: Final = {
    "token_mean": learner_pb2.LOSS_AGGREGATION_TOKEN_MEAN,
    "sequence_mean_token_mean": learner_pb2.LOSS_AGGREGATION_SEQUENCE_MEAN_TOKEN_MEAN,
    "sequence_mean_token_sum": learner_pb2.LOSS_AGGREGATION_SEQUENCE_MEAN_TOKEN_SUM,
    "fixed_length": learner_pb2.LOSS_AGGREGATION_FIXED_LENGTH,
}
KL_ESTIMATORS: Final = {
    "k1": learner_pb2.KL_ESTIMATOR_K1,
    "k2": learner_pb2.KL_ESTIMATOR_K2,
    "k3": learner_pb2.KL_ESTIMATOR_K3,
}
RATIO_LEVELS: Final = {
    "token": learner_pb2.RATIO_LEVEL_TOKEN,
    "sequence": learner_pb2.RATIO_LEVEL_SEQUENCE,
    "sequence_mean": learner_pb2.RATIO_LEVEL_SEQUENCE_MEAN,
    "segment_mean": learner_pb2.RATIO_LEVEL_SEGMENT_MEAN,
}


def loss_settings(config: RunConfig, kl_coefficient: float = 0.0) -> learner_pb2.LossSettings:
    """Returns the objective of a step.

    Args:
        config: The run.
        kl_coefficient: Coefficient of the divergence in this step.
    """
    algorithm = config.algorithm
    clips = algorithm.policy_loss in CLIPPING
    loss = learner_pb2.LossSettings(
        policy_loss=algorithm.policy_loss,
        clip_low=algorithm.clip_low if clips else 0.0,
        clip_high=algorithm.clip_high if clips else 0.0,
        entropy_coefficient=algorithm.entropy_coefficient,
        aggregation=AGGREGATIONS[algorithm.aggregation],
        temperature=config.training_temperature,
        recompute_old_logprobs=algorithm.recompute_old_logprobs,
        dual_clip=algorithm.dual_clip,
        fixed_length_tokens=algorithm.fixed_length_tokens,
        value_clip=algorithm.value_clip,
    )
    if config.needs_reference and algorithm.kl.apply_to == "loss":
        loss.kl_coefficient = kl_coefficient
        loss.kl_estimator = KL_ESTIMATORS[algorithm.kl.estimator]
    _add_importance(loss, algorithm)
    return loss


def _add_importance(loss: learner_pb2.LossSettings, algorithm: AlgorithmSection) -> None:
    weight = algorithm.importance_weight
    if weight.level != "none":
        loss.importance_weight.level = RATIO_LEVELS[weight.level]
        loss.importance_weight.upper_bound = weight.upper_bound
    for mask in algorithm.importance_masks:
        loss.importance_masks.add(level=RATIO_LEVELS[mask.level], min_ratio=mask.min_ratio, max_ratio=mask.max_ratio)
