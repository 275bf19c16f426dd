from __future__ import annotations

import typing

from rollwire.coordinator.training import AGGREGATIONS, loss_settings
from rollwire.serving.config import load_config
from rollwire.serving.config.algorithm import AlgorithmSection
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


def test_every_aggregation_of_the_configuration_has_its_value() -> None:
    assert set(typing.get_args(AlgorithmSection.model_fields["aggregation"].annotation)) == set(AGGREGATIONS)
