"""The critic's loss and training against plain implementations that share no code with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollwire.learner.batching import Budget, optimizer_step_split
from rollwire.learner.critic import Critic, with_value_head
from rollwire.learner.critic_step import train_critic, value_loss
from rollwire.learner.objective import LossSettings
from rollwire.learner.optimizer import PolicyOptimizer, StepOutcome
from rollwire.learner.samples import Sample
from rollwire.learner.scoring import predict
from rollwire.learner.step import StepSettings
from rollwire.serving.config.sections import OptimizerSection
from rollwire.serving.server import ServeError

CPU = torch.device("cpu")
LARGE, SMALL = Budget(100_000, 128), Budget(1, 0)
MakeModel = Callable[..., Any]
MakeSamples = Callable[..., list[Sample]]


class GradientReader:
    """Takes the place of the optimizer: keeps the gradient and changes nothing."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.gradients: list[dict[str, torch.Tensor]] = []

    def step(self) -> StepOutcome:
        found = {name: value.grad.clone() for name, value in self._model.named_parameters() if value.grad is not None}
        self.gradients.append(found)
        self._model.zero_grad()
        return StepOutcome(applied=True, grad_norm=1.0, learning_rate=0.0)


@pytest.fixture
def critic(make_model: MakeModel) -> Critic:
    """A critic whose head is not zero any more."""
    model = with_value_head(make_model())
    torch.manual_seed(1)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.3)
    return Critic(model, CPU, "float32")


def with_returns(samples: list[Sample], critic: Critic) -> list[Sample]:
    """Returns samples with random returns, and earlier predictions near the present ones."""
    random = np.random.default_rng(4)
    values = [found for (found,) in predict(critic, samples, LARGE)]
    return [
        replace(
            sample,
            returns=random.normal(0, 2, len(sample.token_ids)).astype(np.float32),
            values=value + random.normal(0, 0.3, len(value)).astype(np.float32),
        )
        for sample, value in zip(samples, values, strict=True)
    ]


def plain_values(model: Any, sample: Sample) -> dict[int, torch.Tensor]:
    """Returns the value of each trained position from the hidden state before it."""
    hidden = model.base_model(input_ids=torch.from_numpy(sample.token_ids)[None])[0][0]
    head = model.get_output_embeddings()
    return {
        position: hidden[position - 1] @ head.weight[0] + head.bias[0]
        for position in range(1, len(sample.token_ids))
        if sample.loss_mask[position]
    }


def plain_loss(model: Any, samples: list[Sample], clip: float) -> torch.Tensor:
    terms = []
    for sample in samples:
        for position, value in plain_values(model, sample).items():
            wanted, before = float(sample.returns[position]), float(sample.values[position])
            error = (value - wanted) ** 2
            if clip:
                bounded = before + max(-clip, min(clip, value.item() - before))
                if (bounded - wanted) ** 2 > error.item():
                    inside = abs(value.item() - before) < clip
                    error = (value - wanted) ** 2 if inside else error * 0 + (bounded - wanted) ** 2
            terms.append(error / 2)
    return sum(terms) / len(terms)


def test_a_new_critic_predicts_zero_and_keeps_the_backbone(make_model: MakeModel, make_samples: MakeSamples) -> None:
    model, original = with_value_head(make_model()), make_model()
    samples = make_samples()

    values = predict(Critic(model, CPU, "float32"), samples, LARGE)

    assert all(not value.any() for (value,) in values)
    backbone = dict(model.base_model.named_parameters())
    for name, parameter in original.base_model.named_parameters():
        assert torch.equal(backbone[name], parameter)


@pytest.mark.parametrize("architecture", ["Qwen2", "Llama", "Gemma2", "Qwen3", "GPT2"])
@pytest.mark.parametrize("budget", [LARGE, SMALL], ids=["one micro-batch", "many micro-batches"])
def test_values_are_those_of_the_plain_forward_pass(
    architecture: str, budget: Budget, make_model: MakeModel, make_samples: MakeSamples
) -> None:
    model = with_value_head(make_model(architecture))
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.3)
    samples = make_samples()

    found = predict(Critic(model, CPU, "float32"), samples, budget)

    for sample, (values,) in zip(samples, found, strict=True):
        expected = np.zeros(len(sample.token_ids))
        for position, value in plain_values(model, sample).items():
            expected[position] = value.item()
        np.testing.assert_allclose(values, expected, atol=2e-5)


@pytest.mark.parametrize("clip", [0.0, 0.2])
@pytest.mark.parametrize("budget", [LARGE, SMALL], ids=["one micro-batch", "many micro-batches"])
def test_loss_and_gradient_are_those_of_the_plain_implementation(
    clip: float, budget: Budget, critic: Critic, make_samples: MakeSamples
) -> None:
    samples = with_returns(make_samples(), critic)
    reader = GradientReader(critic.model)

    settings = StepSettings(LossSettings(value_clip=clip), 1, 0, train_critic=True)
    metrics = train_critic(critic, reader, samples, settings, budget)

    expected = plain_loss(critic.model, samples, clip)
    parameters = dict(critic.model.named_parameters())
    gradients = torch.autograd.grad(expected, list(parameters.values()))
    assert metrics["critic/loss"] == pytest.approx(expected.item(), abs=1e-5)
    for name, wanted in zip(parameters, gradients, strict=True):
        assert (reader.gradients[0][name] - wanted).abs().max() <= 2e-5, name
    assert ("critic/clipfrac" in metrics) is (clip > 0)
    assert clip == 0 or 0 < metrics["critic/clipfrac"] < 1


@pytest.mark.parametrize(
    ("value", "before", "wanted", "loss", "gradient"),
    [
        (1.0, 0.9, 2.0, 0.5, -1.0),  # inside the range
        (2.0, 1.0, 3.0, 0.5 * 1.8**2, 0.0),  # moved towards the return further than the clip allows
        (2.0, 1.0, 1.0, 0.5, 1.0),  # moved away from it: nothing is clipped
    ],
)
def test_the_clip_stops_a_prediction_that_moved_far(
    value: float, before: float, wanted: float, loss: float, gradient: float
) -> None:
    values = torch.tensor([value], requires_grad=True)

    found, _ = value_loss(values, torch.tensor([wanted]), torch.tensor([before]), 0.2)

    assert found.item() == pytest.approx(loss)
    assert torch.autograd.grad(found.sum(), values)[0].item() == pytest.approx(gradient)


def test_each_optimizer_step_sees_its_own_samples(critic: Critic, make_samples: MakeSamples) -> None:
    samples = with_returns(make_samples(), critic)
    reader = GradientReader(critic.model)

    train_critic(critic, reader, samples, StepSettings(LossSettings(), 3, 9, train_critic=True), LARGE)

    split = optimizer_step_split(len(samples), 3, seed=9)
    assert len(reader.gradients) == 3
    for found, chosen in zip(reader.gradients, split, strict=True):
        expected = plain_loss(critic.model, [samples[index] for index in chosen], 0.0)
        head = critic.model.get_output_embeddings()
        (wanted,) = torch.autograd.grad(expected, [head.weight])
        assert (found["lm_head.weight"] - wanted).abs().max() <= 2e-5


def test_training_brings_predictions_to_the_returns(critic: Critic, make_samples: MakeSamples) -> None:
    samples = [replace(sample, returns=np.full(len(sample.token_ids), 1.5, np.float32)) for sample in make_samples()]
    optimizer = PolicyOptimizer(critic.model, OptimizerSection(learning_rate=1e-2), 100, fused=True)
    settings = StepSettings(LossSettings(), 1, 0, train_critic=True)

    errors = [train_critic(critic, optimizer, samples, settings, LARGE)["critic/error"] for _ in range(30)]

    assert errors[-1] < errors[0] / 20


def test_a_gradient_that_is_not_finite_vetoes_the_step(critic: Critic, make_samples: MakeSamples) -> None:
    samples = [replace(sample, returns=np.full(len(sample.token_ids), 3e38, np.float32)) for sample in make_samples(2)]
    before = [parameter.clone() for parameter in critic.model.parameters()]
    optimizer = PolicyOptimizer(critic.model, OptimizerSection(learning_rate=1e-2), 100, fused=True)

    metrics = train_critic(critic, optimizer, samples, StepSettings(LossSettings(), 1, 0, train_critic=True), LARGE)

    assert metrics["critic/skipped_steps"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, critic.model.parameters(), strict=True))


def test_a_model_without_a_head_cannot_be_a_critic(make_model: MakeModel) -> None:
    with pytest.raises(ServeError, match="has no output head"):
        with_value_head(make_model().base_model)
