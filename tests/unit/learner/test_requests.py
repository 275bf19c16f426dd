"""Every field of a training request is checked, and the error names it."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest

from rollwire.learner.loss_requests import parse_temperature
from rollwire.learner.objective import Aggregation, ImportanceMask, ImportanceWeight, KlEstimator, LossSettings
from rollwire.learner.ratios import RatioLevel
from rollwire.learner.requests import SequenceLimits, needed_fields, parse_header, parse_samples, parse_sequences
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import learner_pb2

FIXED_LENGTH = learner_pb2.LOSS_AGGREGATION_FIXED_LENGTH
LIMITS = SequenceLimits(vocabulary_size=10, max_tokens=6)


def sample(**changes: Any) -> learner_pb2.TrainSample:
    fields = {
        "sample_id": "a",
        "token_ids": [1, 2, 3],
        "loss_mask": [False, True, True],
        "advantages": [0.0, 1.5, -1.5],
        "logprobs": [0.0, -1.0, -2.0],
    }
    return learner_pb2.TrainSample(**{**fields, **changes})


def header(loss: dict[str, Any] | None = None, **changes: Any) -> learner_pb2.TrainHeader:
    fields: dict[str, Any] = {"base_version": {"lineage": "line", "step": 4}, "optimizer_steps": 2, "shuffle_seed": 7}
    return learner_pb2.TrainHeader(**{**fields, **changes}, loss=loss or {})


def recomputed(**changes: Any) -> dict[str, Any]:
    return {"recompute_old_logprobs": True, **changes}


def test_a_valid_sample_is_taken_as_it_is() -> None:
    (found,) = parse_samples([sample()], LIMITS)

    assert found.sample_id == "a"
    assert found.token_ids.tolist() == [1, 2, 3]
    assert found.loss_mask.tolist() == [False, True, True]
    assert found.advantages.tolist() == [0.0, 1.5, -1.5]
    assert found.logprobs.tolist() == [0.0, -1.0, -2.0]
    assert not found.comparable


def test_whether_logprobs_are_comparable_is_taken_from_the_sample() -> None:
    (found,) = parse_samples([sample(comparable_logprobs=True)], LIMITS)

    assert found.comparable


def test_position_0_is_never_trained() -> None:
    (found,) = parse_samples([sample(loss_mask=[True, False, True])], LIMITS)

    assert found.loss_mask.tolist() == [False, False, True]
    assert found.targets == 1


def test_values_where_nothing_is_trained_do_not_matter() -> None:
    parse_samples([sample(advantages=[math.nan, 1.0, 1.0], logprobs=[5.0, -1.0, -1.0])], LIMITS)


def test_a_logprob_may_exceed_zero_by_rounding() -> None:
    parse_samples([sample(logprobs=[0.0, 1e-6, -1.0])], LIMITS)


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("samples[1].sample_id", {"sample_id": ""}),
        ("samples[1].sample_id", {"sample_id": "x" * 257}),
        ("samples[1].sample_id", {"sample_id": "a"}),
        ("samples[1].token_ids", {"token_ids": [1], "loss_mask": [True], "advantages": [0], "logprobs": [0]}),
        ("samples[1].token_ids", {"token_ids": [1] * 7}),
        ("samples[1].token_ids[1]", {"token_ids": [1, 10, 3]}),
        ("samples[1].token_ids[2]", {"token_ids": [1, 2, -1]}),
        ("samples[1].loss_mask", {"loss_mask": [False, True]}),
        ("samples[1].loss_mask", {"loss_mask": [True, False, False]}),
        ("samples[1].advantages", {"advantages": [0.0, 1.0]}),
        ("samples[1].advantages[1]", {"advantages": [0.0, math.nan, 1.0]}),
        ("samples[1].advantages[2]", {"advantages": [0.0, 1.0, math.inf]}),
        ("samples[1].logprobs", {"logprobs": []}),
        ("samples[1].logprobs[1]", {"logprobs": [0.0, -math.inf, -1.0]}),
        ("samples[1].logprobs[2]", {"logprobs": [0.0, -1.0, 0.1]}),
        ("samples[1].reference_logprobs", {"reference_logprobs": [-1.0]}),
        ("samples[1].reference_logprobs[1]", {"reference_logprobs": [0.0, 0.5, -1.0]}),
        ("samples[1].returns", {"returns": [1.0, 1.0]}),
        ("samples[1].returns[2]", {"returns": [0.0, 1.0, math.inf]}),
        ("samples[1].values[1]", {"values": [0.0, math.nan, 1.0]}),
    ],
)
def test_an_invalid_sample_is_refused_with_its_path(path: str, changes: dict[str, Any]) -> None:
    second = sample(**{"sample_id": "b", **changes})

    with pytest.raises(RollwireError) as caught:
        parse_samples([sample(), second], LIMITS)

    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.reason == Reason.INVALID_FIELD
    assert list(caught.value.fields) == [path]
    assert "allowed: " in caught.value.message


OPTIONAL = {"reference_logprobs": [0.0, -1.0, -2.0], "returns": [0.0, 2.0, 3.0], "values": [0.0, 4.0, 5.0]}


def test_optional_fields_are_taken_where_they_are_given() -> None:
    bare, full = parse_samples([sample(), sample(sample_id="b", **OPTIONAL)], LIMITS)

    for name, values in OPTIONAL.items():
        assert getattr(bare, name) is None
        assert getattr(full, name).tolist() == values


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_field_that_the_step_needs_may_not_be_empty(name: str) -> None:
    fields = {key: values for key, values in OPTIONAL.items() if key != name}

    with pytest.raises(RollwireError) as caught:
        parse_samples([sample(**OPTIONAL), sample(sample_id="b", **fields)], LIMITS, frozenset(OPTIONAL))

    assert list(caught.value.fields) == [f"samples[1].{name}"]


def test_what_a_step_needs_of_its_samples() -> None:
    def needs(loss: dict[str, Any], **changes: Any) -> set[str]:
        return set(needed_fields(parse_header(header(loss, **changes))))

    assert needs({}) == set()
    assert needs({"kl_coefficient": 0.1}) == {"reference_logprobs"}
    assert needs({"kl_coefficient": 0.1}, train_critic=True, freeze_policy=True) == {"returns"}
    assert needs({"value_clip": 0.2}, train_critic=True) == {"returns", "values"}


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(RollwireError, match="at least one sample"):
        parse_samples([], LIMITS)


def test_scoring_needs_neither_advantages_nor_logprobs_nor_targets() -> None:
    (found,) = parse_sequences([sample(advantages=[], logprobs=[], loss_mask=[False] * 3)], LIMITS)

    assert found.targets == 0


def test_a_header_with_defaults_means_ppo_clip_and_token_mean() -> None:
    settings = parse_header(header({"clip_low": 0.25, "clip_high": 0.5}))

    assert settings.loss == LossSettings("ppo_clip", 0.25, 0.5, 0.0, Aggregation.TOKEN_MEAN, 1.0, False)
    assert (settings.optimizer_steps, settings.shuffle_seed) == (2, 7)


def test_a_header_is_taken_as_it_is() -> None:
    settings = parse_header(
        header(
            {
                "policy_loss": "ppo_clip",
                "entropy_coefficient": 0.5,
                "aggregation": learner_pb2.LOSS_AGGREGATION_SEQUENCE_MEAN_TOKEN_SUM,
                "temperature": 0.75,
                "recompute_old_logprobs": True,
            }
        )
    )

    assert settings.loss == LossSettings("ppo_clip", 0.0, 0.0, 0.5, Aggregation.SEQUENCE_MEAN_TOKEN_SUM, 0.75, True)


def test_every_setting_of_the_objective_is_taken() -> None:
    settings = parse_header(
        header(
            {
                "policy_loss": "gspo",
                "clip_low": 3e-4,
                "clip_high": 4e-4,
                "aggregation": FIXED_LENGTH,
                "fixed_length_tokens": 100,
                "dual_clip": 3.0,
                "recompute_old_logprobs": True,
                "kl_coefficient": 0.25,
                "kl_estimator": learner_pb2.KL_ESTIMATOR_K2,
                "importance_weight": {"level": learner_pb2.RATIO_LEVEL_SEQUENCE, "upper_bound": 2.0},
                "importance_masks": [
                    {"level": learner_pb2.RATIO_LEVEL_TOKEN, "min_ratio": 0.5, "max_ratio": 2.0},
                    {"level": learner_pb2.RATIO_LEVEL_SEGMENT_MEAN, "min_ratio": 0.5},
                ],
                "value_clip": 0.2,
            },
            train_critic=True,
            freeze_policy=True,
        )
    )

    assert (settings.train_critic, settings.freeze_policy) == (True, True)
    assert settings.loss == LossSettings(
        policy_loss="gspo",
        clip_low=3e-4,
        clip_high=4e-4,
        aggregation=Aggregation.FIXED_LENGTH,
        fixed_length_tokens=100,
        dual_clip=3.0,
        recompute_old_logprobs=True,
        kl_coefficient=0.25,
        kl_estimator=KlEstimator.K2,
        importance_weight=ImportanceWeight(RatioLevel.SEQUENCE, 2.0),
        importance_masks=(
            ImportanceMask(RatioLevel.TOKEN, 0.5, 2.0),
            ImportanceMask(RatioLevel.SEGMENT_MEAN, 0.5, math.inf),
        ),
        value_clip=0.2,
    )


@pytest.mark.parametrize(
    ("path", "bad"),
    [
        ("header.base_version.lineage", header(base_version={"lineage": ""})),
        ("header.base_version.lineage", header(base_version={"lineage": "../x"})),
        ("header.optimizer_steps", header(optimizer_steps=0)),
        ("header.optimizer_steps", header(optimizer_steps=4097)),
        ("header.loss.policy_loss", header({"policy_loss": "nonesuch"})),
        ("header.loss.clip_low", header({"clip_low": 1.0})),
        ("header.loss.clip_low", header({"clip_low": math.nan})),
        ("header.loss.clip_high", header({"clip_high": -0.1})),
        ("header.loss.clip_high", header({"clip_high": math.inf})),
        ("header.loss.entropy_coefficient", header({"entropy_coefficient": -1.0})),
        ("header.loss.temperature", header({"temperature": -1.0})),
        ("header.loss.temperature", header({"temperature": math.nan})),
        ("header.loss.aggregation", header({"aggregation": 99})),
        ("header.loss.dual_clip", header({"dual_clip": 1.0})),
        ("header.loss.dual_clip", header({"dual_clip": math.inf})),
        ("header.loss.dual_clip", header({"policy_loss": "cispo", "dual_clip": 3.0})),
        ("header.loss.clip_low", header({"policy_loss": "topr", "clip_low": 0.2})),
        ("header.loss.clip_high", header({"policy_loss": "policy_gradient", "clip_high": 0.2})),
        ("header.loss.kl_coefficient", header({"kl_coefficient": -1.0})),
        ("header.loss.kl_estimator", header({"kl_estimator": 9})),
        ("header.loss.fixed_length_tokens", header({"aggregation": FIXED_LENGTH})),
        ("header.loss.fixed_length_tokens", header({"fixed_length_tokens": 10})),
        ("header.loss.importance_weight", header({"importance_weight": {"level": 1, "upper_bound": 2.0}})),
        ("header.loss.importance_weight.level", header(recomputed(importance_weight={"upper_bound": 2.0}))),
        ("header.loss.importance_weight.upper_bound", header(recomputed(importance_weight={"level": 1}))),
        ("header.loss.importance_masks[0]", header({"importance_masks": [{"level": 1}]})),
        ("header.loss.importance_masks[1].level", header(recomputed(importance_masks=[{"level": 1}, {}]))),
        (
            "header.loss.importance_masks[0].max_ratio",
            header(recomputed(importance_masks=[{"level": 1, "min_ratio": 2.0, "max_ratio": 1.0}])),
        ),
        (
            "header.loss.importance_masks[0].min_ratio",
            header(recomputed(importance_masks=[{"level": 1, "min_ratio": -1.0}])),
        ),
        ("header.loss.importance_masks", header(recomputed(importance_masks=[{"level": 1}] * 17))),
        ("header.loss.value_clip", header({"value_clip": 0.2})),
        ("header.loss.value_clip", header({"value_clip": -0.2}, train_critic=True)),
        ("header.freeze_policy", header(freeze_policy=True)),
    ],
)
def test_an_invalid_header_is_refused_with_its_path(path: str, bad: learner_pb2.TrainHeader) -> None:
    with pytest.raises(RollwireError) as caught:
        parse_header(bad)

    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert list(caught.value.fields) == [path]


def test_temperature_0_means_1() -> None:
    assert parse_temperature("temperature", 0.0) == 1.0
    assert parse_temperature("temperature", 0.5) == 0.5
