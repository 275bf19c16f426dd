from __future__ import annotations

import typing

import pytest

from rollwire.coordinator.objective import AGGREGATIONS, KL_ESTIMATORS, RATIO_LEVELS, loss_settings
from rollwire.learner.loss_requests import parse_loss
from rollwire.learner.policy_losses import POLICY_LOSSES
from rollwire.serving.config import load_config
from rollwire.serving.config.algorithm import (
    CLIPPING,
    DUAL_CLIPPING,
    AlgorithmSection,
    ImportanceWeightSection,
    KlSection,
    RatioLevel,
)
from rollwire.v1 import learner_pb2


def test_the_loss_is_the_configured_one() -> None:
    config = load_config(
        None,
        [
            "algorithm.clip_low=0.1",
            "algorithm.clip_high=0.3",
            "algorithm.entropy_coefficient=0.01",
            "algorithm.aggregation=sequence_mean_token_sum",
            "algorithm.recompute_old_logprobs=true",
            "sampling.temperature=0.7",
        ],
    )
    assert loss_settings(config) == learner_pb2.LossSettings(
        policy_loss="ppo_clip",
        clip_low=0.1,
        clip_high=0.3,
        entropy_coefficient=0.01,
        aggregation=learner_pb2.LOSS_AGGREGATION_SEQUENCE_MEAN_TOKEN_SUM,
        temperature=0.7,
        recompute_old_logprobs=True,
    )


def test_every_setting_of_the_objective_reaches_the_learner() -> None:
    config = load_config(
        None,
        [
            "algorithm.policy_loss=gspo",
            "algorithm.clip_low=0.0003",
            "algorithm.clip_high=0.0004",
            "algorithm.dual_clip=3",
            "algorithm.advantage=gae",
            "algorithm.value_clip=0.2",
            "algorithm.aggregation=fixed_length",
            "algorithm.fixed_length_tokens=512",
            "algorithm.kl.coefficient=0.1",
            "algorithm.kl.estimator=k2",
            "algorithm.recompute_old_logprobs=true",
            "algorithm.importance_weight={level: sequence_mean, upper_bound: 1.5}",
            "algorithm.importance_masks=[{level: token, min_ratio: 0.5, max_ratio: 2}, {level: segment_mean}]",
        ],
    )
    assert loss_settings(config, 0.25) == learner_pb2.LossSettings(
        policy_loss="gspo",
        clip_low=0.0003,
        clip_high=0.0004,
        dual_clip=3,
        value_clip=0.2,
        aggregation=learner_pb2.LOSS_AGGREGATION_FIXED_LENGTH,
        fixed_length_tokens=512,
        temperature=1.0,
        kl_coefficient=0.25,
        kl_estimator=learner_pb2.KL_ESTIMATOR_K2,
        recompute_old_logprobs=True,
        importance_weight={"level": learner_pb2.RATIO_LEVEL_SEQUENCE_MEAN, "upper_bound": 1.5},
        importance_masks=[
            {"level": learner_pb2.RATIO_LEVEL_TOKEN, "min_ratio": 0.5, "max_ratio": 2},
            {"level": learner_pb2.RATIO_LEVEL_SEGMENT_MEAN},
        ],
    )


def test_a_divergence_in_the_reward_is_not_in_the_loss() -> None:
    config = load_config(None, ["algorithm.kl.coefficient=0.1", "algorithm.kl.apply_to=reward"])
    loss = loss_settings(config, 0.1)
    assert (loss.kl_coefficient, loss.kl_estimator) == (0, learner_pb2.KL_ESTIMATOR_UNSPECIFIED)


@pytest.mark.parametrize("name", typing.get_args(AlgorithmSection.model_fields["policy_loss"].annotation))
def test_the_learner_takes_the_objective_of_every_policy_loss(name: str) -> None:
    loss = loss_settings(load_config(None, [f"algorithm.policy_loss={name}"]))
    assert parse_loss("loss", loss).policy_loss == name


def test_the_configuration_knows_which_losses_there_are_and_which_clip() -> None:
    offered = typing.get_args(AlgorithmSection.model_fields["policy_loss"].annotation)
    assert set(offered) == set(POLICY_LOSSES)
    assert {name for name, kind in POLICY_LOSSES.items() if kind.clips} == set(CLIPPING)
    assert {name for name, kind in POLICY_LOSSES.items() if kind.dual_clips} == set(DUAL_CLIPPING)


def test_every_choice_of_the_configuration_has_its_value() -> None:
    fields = AlgorithmSection.model_fields
    assert set(typing.get_args(fields["aggregation"].annotation)) == set(AGGREGATIONS)
    assert set(typing.get_args(KlSection.model_fields["estimator"].annotation)) == set(KL_ESTIMATORS)
    assert set(typing.get_args(RatioLevel)) == set(RATIO_LEVELS)
    weighted = typing.get_args(ImportanceWeightSection.model_fields["level"].annotation)
    assert set(weighted) == {"none", *RATIO_LEVELS}
