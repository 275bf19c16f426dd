from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from rollwire.coordinator.batch import Batch, select_batch
from rollwire.coordinator.credit import assign
from rollwire.coordinator.groups import Tally
from rollwire.coordinator.metrics import (
    Throughput,
    batch_metrics,
    count_tokens,
    finite_metrics,
    scheduler_metrics,
    staleness_metrics,
    validation_metrics,
)
from rollwire.serving.config.algorithm import AlgorithmSection
from rollwire.v1 import trajectory_pb2

Maker = Callable[..., trajectory_pb2.Trajectory]


def build_batch(groups: list[list[trajectory_pb2.Trajectory]], advantage: str) -> Batch:
    algorithm = AlgorithmSection.model_validate({"advantage": advantage})
    batch = select_batch(groups, algorithm)
    assign(batch, algorithm)
    return batch


def test_tokens_of_a_trajectory(make_trajectory: Maker) -> None:
    counts = count_tokens(make_trajectory(turns=[(10, 3), (5, 2)]))
    assert (counts.prompt, counts.response, counts.non_prompt, counts.total) == (10, 5, 10, 20)


def test_scores_are_over_everything_consumed_and_advantages_over_trained_tokens(make_trajectory: Maker) -> None:
    mixed = [make_trajectory("a", 0, 1.0, turns=[(2, 6)]), make_trajectory("a", 1, 0.0, turns=[(2, 2)])]
    solved = [make_trajectory("b", episode, 1.0, turns=[(2, 4)]) for episode in range(2)]
    batch = build_batch([mixed, solved], "dr_grpo")
    metrics = {**batch_metrics(batch), **batch.metrics}
    assert metrics["critic/score/mean"] == metrics["rollout/score/mean"] == 0.75
    assert (metrics["critic/score/min"], metrics["critic/score/max"]) == (0.0, 1.0)
    assert metrics["scheduler/group_filter_count"] == 1
    assert metrics["critic/rewards/mean"] == 0.0
    assert metrics["critic/advantages/mean"] == pytest.approx((6 * 0.5 - 2 * 0.5) / 8)
    assert (metrics["critic/advantages/min"], metrics["critic/advantages/max"]) == (-0.5, 0.5)
    assert (metrics["tokens/response_length/mean"], metrics["rollout/response_length/mean"]) == (4, 4)
    assert (metrics["tokens/response_length/max"], metrics["tokens/response_length/min"]) == (6, 2)
    assert metrics["env/response_length"] == 4


def test_environment_metrics_are_means_per_tag_over_episodes_that_have_them(make_trajectory: Maker) -> None:
    group = [
        make_trajectory("a", 0, 1.0, metrics={"success": 1, "action_is_valid": 0.5}, turns=[(2, 1)] * 3),
        make_trajectory("a", 1, 0.0, metrics={"success": 0}),
    ]
    other = [make_trajectory("b", 0, 2.0, tag="Sokoban", metrics={"num_actions": 9.0}), make_trajectory("b", 1, 0.0)]
    metrics = batch_metrics(build_batch([group, other], "grpo"))
    assert metrics["env/FrozenLake/success"] == 0.5
    assert metrics["env/FrozenLake/action_is_valid"] == 0.5
    assert metrics["env/Sokoban/num_actions"] == 9
    assert metrics["env/FrozenLake/num_actions"] == pytest.approx((3 + 1 + 1) / 3)


def test_an_empty_training_batch_still_reports_scores(make_trajectory: Maker) -> None:
    metrics = batch_metrics(build_batch([[make_trajectory("a", 0, 1.0)] * 2], "grpo"))
    assert metrics["critic/score/mean"] == 1.0
    assert "critic/advantages/mean" not in metrics and "tokens/response_length/mean" not in metrics


def test_validation(make_trajectory: Maker) -> None:
    played = [
        make_trajectory("a", 0, 1.0, metrics={"success": 1}),
        make_trajectory("b", 0, 0.0, metrics={"success": 0}),
        make_trajectory("c", 0, 4.0, tag="Sokoban"),
    ]
    metrics = validation_metrics(played)
    assert metrics["val/score/mean"] == pytest.approx(5 / 3)
    assert (metrics["val/FrozenLake/score/mean"], metrics["val/Sokoban/score/max"]) == (0.5, 4.0)
    assert metrics["val/env/FrozenLake/success"] == 0.5
    assert metrics["val/episodes"] == 3
    assert "val_greedy/score/mean" in validation_metrics(played, "val_greedy")


def test_scheduler_counts_add_up() -> None:
    metrics = scheduler_metrics(Tally(10, 6, Counter({"rollout_lost": 2, "environment_error": 1})), 4)
    assert metrics["scheduler/requested"] == (
        metrics["scheduler/completed"] + metrics["scheduler/failed"] + metrics["scheduler/in_flight"]
    )
    assert metrics["scheduler/failures/rollout_lost"] == 2
    assert metrics["scheduler/groups_dropped"] == 4


def test_staleness() -> None:
    assert staleness_metrics([0, 1, 2]) == {"staleness/mean": 1.0, "staleness/max": 2.0}
    assert staleness_metrics([]) == {}


def test_throughput_is_over_the_last_five_steps() -> None:
    throughput = Throughput()
    assert throughput.add(1000, 1.0) == 1000
    for _ in range(5):
        rate = throughput.add(100, 2.0)
    assert rate == 50


def test_only_finite_python_floats_are_written() -> None:
    metrics = {"a": np.float32(1.5), "b": np.int64(2), "c": float("nan"), "d": float("inf"), "e": True}
    finite = finite_metrics(metrics)  # type: ignore[arg-type]
    assert finite == {"a": 1.5, "b": 2.0, "e": 1.0}
    assert all(type(value) is float for value in finite.values())
