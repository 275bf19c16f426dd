"""Learning-rate schedule."""

from __future__ import annotations

import math

import pytest

from rollwire.learner.schedule import learning_rate
from rollwire.serving.config.sections import OptimizerSection


def rates(total: int, steps: int | None = None, **settings: object) -> list[float]:
    section = OptimizerSection.model_validate({"learning_rate": 1.0, **settings})
    return [learning_rate(index, total, section) for index in range(steps or total)]


def test_constant_stays_at_the_peak() -> None:
    assert rates(4) == [1.0, 1.0, 1.0, 1.0]


def test_warm_up_rises_linearly_and_ends_at_the_peak() -> None:
    assert rates(6, warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_ends_at_the_final_ratio_in_the_last_step() -> None:
    assert rates(5, schedule="linear", final_learning_rate_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_follows_half_a_wave_after_the_warm_up() -> None:
    found = rates(6, schedule="cosine", warmup_steps=1)

    expected = [0.5, *(0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(5))]
    assert found == pytest.approx(expected)


def test_a_run_of_one_step_trains_at_the_peak() -> None:
    assert rates(1, schedule="linear") == [1.0]


def test_steps_beyond_the_plan_keep_the_final_rate() -> None:
    assert rates(3, steps=5, schedule="linear", final_learning_rate_ratio=0.1)[2:] == pytest.approx([0.1, 0.1, 0.1])


def test_a_warm_up_longer_than_the_run_only_rises() -> None:
    found = rates(3, schedule="cosine", warmup_steps=9)

    assert found == pytest.approx([0.1, 0.2, 0.3])
