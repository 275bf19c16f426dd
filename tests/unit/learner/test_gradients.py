"""Gradient norm, clipping and the loss scale."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rollwire.learner.gradients import Gradients, LossScale


def _parameters(*gradients: list[float]) -> list[nn.Parameter]:
    made = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(len(gradient)))
        parameter.grad = torch.tensor(gradient)
        made.append(parameter)
    return made


def test_the_norm_is_that_of_all_gradients_together() -> None:
    assert Gradients(_parameters([3.0], [0.0, 4.0])).norm() == pytest.approx(5.0)
    assert Gradients([nn.Parameter(torch.zeros(2))]).norm() == 0.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_one_value_that_is_not_finite_shows_in_the_norm(bad: float) -> None:
    assert not math.isfinite(Gradients(_parameters([1.0], [bad])).norm())


def test_gradients_are_clipped_and_the_loss_scale_taken_out() -> None:
    scale = LossScale("float16")
    parameters = _parameters([3.0 * scale.value], [4.0 * scale.value])
    gradients = Gradients(parameters, scale=scale)
    assert gradients.norm() == pytest.approx(5.0)
    gradients.clip(5.0, 1.0)
    assert [float(parameter.grad) for parameter in parameters] == pytest.approx([0.6, 0.8], rel=1e-5)


def test_short_gradients_stay_as_they_are() -> None:
    parameters = _parameters([0.3], [0.4])
    Gradients(parameters).clip(0.5, 1.0)
    assert [float(parameter.grad) for parameter in parameters] == pytest.approx([0.3, 0.4], rel=1e-7)


def test_the_loss_scale_is_halved_by_overflow_and_doubled_after_2000_good_steps() -> None:
    scale = LossScale("float16")
    scale.update(finite=False)
    assert scale.value == 2.0**15
    for _ in range(1999):
        scale.update(finite=True)
    assert scale.value == 2.0**15
    scale.update(finite=True)
    assert (scale.value, scale.finite_steps) == (2.0**16, 0)
    for _ in range(40):
        scale.update(finite=False)
    assert scale.value == 1.0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_wider_types_need_no_scale(precision: str) -> None:
    scale = LossScale(precision)
    scale.update(finite=False)
    assert (scale.value, scale.dynamic) == (1.0, False)
