"""AdamW with clipping, schedule and veto."""

from __future__ import annotations

import math

import pytest
import torch

from rollwire.learner.optimizer import PolicyOptimizer, decay_groups
from rollwire.serving.config.sections import OptimizerSection


def make(fused: bool = False, total_steps: int = 10, **settings: object) -> tuple[torch.nn.Linear, PolicyOptimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, PolicyOptimizer(model, OptimizerSection.model_validate(settings), total_steps, fused=fused)


def set_gradient(model: torch.nn.Linear, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_follow_the_formula_of_adamw(fused: bool) -> None:
    model, optimizer = make(fused, learning_rate=0.1, weight_decay=0.5, beta1=0.8, beta2=0.9, max_grad_norm=100.0)
    weight, bias = model.weight[0, 0].item(), model.bias[0].item()
    first, second = 0.0, 0.0
    for step, gradient in enumerate([0.3, -0.2, 0.5], start=1):
        set_gradient(model, gradient)
        optimizer.step()
        first = 0.8 * first + 0.2 * gradient
        second = 0.9 * second + 0.1 * gradient**2
        move = 0.1 * (first / (1 - 0.8**step)) / (math.sqrt(second / (1 - 0.9**step)) + 1e-8)
        weight = weight * (1 - 0.1 * 0.5) - move
        bias = bias - move  # biases do not decay

    assert model.weight[0, 0].item() == pytest.approx(weight, abs=1e-6)
    assert model.bias[0].item() == pytest.approx(bias, abs=1e-6)


def test_the_norm_is_reported_before_clipping_and_the_gradient_is_scaled_down() -> None:
    model, optimizer = make(learning_rate=1.0, max_grad_norm=0.5, beta1=0.0, beta2=0.0, epsilon=1.0)
    before = model.weight.detach().clone()
    set_gradient(model, 2.0)

    outcome = optimizer.step()

    norm = 2.0 * math.sqrt(8)
    assert outcome.grad_norm == pytest.approx(norm)
    clipped = 2.0 * 0.5 / norm
    torch.testing.assert_close(
        before - model.weight, torch.full_like(before, clipped / (clipped + 1)), rtol=0, atol=1e-5
    )


def test_gradients_are_freed_after_a_step() -> None:
    model, optimizer = make()
    set_gradient(model, 1.0)

    optimizer.step()

    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_never_applied(value: float) -> None:
    model, optimizer = make(learning_rate=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    set_gradient(model, value)

    outcome = optimizer.step()

    assert not outcome.applied
    assert (optimizer.attempted, optimizer.applied) == (1, 0)
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    set_gradient(model, 1.0)
    assert optimizer.step().applied
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_the_schedule_counts_every_attempt() -> None:
    model, optimizer = make(total_steps=3, learning_rate=1.0, schedule="linear")
    found = []
    for value in (1.0, math.nan, 1.0):
        set_gradient(model, value)
        found.append(optimizer.step().learning_rate)

    assert found == pytest.approx([1.0, 0.5, 0.0])


def test_only_matrices_decay() -> None:
    matrix, vector = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))

    groups = decay_groups([vector, matrix], 0.1)

    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.1), (1, 0.0)]
    assert groups[0]["params"][0] is matrix
    assert len(decay_groups([matrix], 0.1)) == 1
