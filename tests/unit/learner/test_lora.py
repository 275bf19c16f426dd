"""Adapters: what is trained, what is published, and that the merge is the same bits wherever it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rollwire.learner.batching import Budget
from rollwire.learner.gradients import Gradients
from rollwire.learner.lora import Adapter, add_adapters, merged_rows
from rollwire.learner.model import Policy
from rollwire.learner.objective import LossSettings
from rollwire.learner.optimizer import PolicyOptimizer
from rollwire.learner.publish import published
from rollwire.learner.scoring import score
from rollwire.learner.step import StepSettings, train_step
from rollwire.serving.config.sections import LoraSection, OptimizerSection
from rollwire.serving.model_tensors import named_weights
from rollwire.serving.server import ServeError

BUDGET = Budget(4096, 128, lambda: None)
LORA = LoraSection(rank=4, alpha=8)


def bytes_of(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, bytes]:
    return {name: b"".join(bytes(piece) for piece in pieces) for name, _, pieces in published(model, dtype, 100)}


def trained(model: Any, samples: Any, steps: int = 3) -> Policy:
    policy = Policy(model, torch.device("cpu"), "float32")
    optimizer = PolicyOptimizer(
        model,
        OptimizerSection(learning_rate=1e-2),
        steps,
        fused=True,
        gradients=Gradients(parameter for parameter in model.parameters() if parameter.requires_grad),
    )
    for _ in range(steps):
        train_step(policy, optimizer, samples, StepSettings(LossSettings(), 1, 0), BUDGET)
    return policy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fresh_adapters_publish_the_base(make_model: Callable[..., Any], dtype: torch.dtype) -> None:
    plain = bytes_of(make_model(), dtype)
    model = make_model()
    add_adapters(model, LORA, dtype, seed=1)

    assert bytes_of(model, dtype) == plain


def test_only_adapters_are_trained(make_model: Callable[..., Any], make_samples: Callable[..., Any]) -> None:
    model = make_model()
    add_adapters(model, LORA, torch.float32, seed=1)
    before = {name: tensor.detach().clone() for name, tensor in named_weights(model)}
    policy = trained(model, make_samples())

    changed = {name for name, tensor in named_weights(model) if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    # 7 linear modules in each of 2 layers: hidden 32, keys and values 16, intermediate 48.
    assert policy.trainable_parameters == 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    assert policy.parameters == sum(parameter.numel() for parameter in make_model().parameters())


def test_published_weights_compute_what_base_and_adapters_compute(
    make_model: Callable[..., Any], make_samples: Callable[..., Any]
) -> None:
    model, samples = make_model(), make_samples()
    add_adapters(model, LORA, torch.float32, seed=1)
    policy = trained(model, samples)

    plain = make_model(seed=5)
    state = dict(plain.named_parameters())
    with torch.no_grad():
        for name, data in bytes_of(model).items():
            state[name].copy_(torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(state[name].shape))
    untrained = Policy(make_model(), torch.device("cpu"), "float32")
    merged = Policy(plain, torch.device("cpu"), "float32")
    for left, right, start in zip(
        score(policy, samples, 1.0, BUDGET),
        score(merged, samples, 1.0, BUDGET),
        score(untrained, samples, 1.0, BUDGET),
        strict=True,
    ):
        np.testing.assert_allclose(left[0], right[0], atol=2e-4)
        assert np.abs(left[0] - start[0]).max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merge_is_plain_arithmetic_in_a_fixed_order(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(37, 53, generator=generator).to(dtype)
    adapter = Adapter(torch.randn(5, 53, generator=generator), torch.randn(37, 5, generator=generator), 1.7)

    expected = base.float().numpy().copy()
    scaled = adapter.up.numpy() * np.float32(1.7)
    for k in range(5):
        for row in range(37):
            for column in range(53):
                expected[row, column] += scaled[row, k] * adapter.down.numpy()[k, column]

    pieces = [merged_rows(base, adapter, first, min(first + 8, 37)) for first in range(0, 37, 8)]
    assert torch.cat(pieces).numpy().tobytes() == expected.tobytes()


def test_the_seed_determines_adapters_and_nothing_else_does(make_model: Callable[..., Any]) -> None:
    made = []
    for seed, noise in ((1, 10), (1, 20), (2, 10)):
        model = make_model()
        torch.manual_seed(noise)
        add_adapters(model, LORA, torch.float32, seed)
        made.append(model.model.layers[0].mlp.up_proj.lora_A["default"].weight)
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


def test_chosen_modules_alone_get_adapters(make_model: Callable[..., Any]) -> None:
    model = make_model()
    add_adapters(model, LoraSection(rank=2, target_modules=["q_proj"]), torch.float32, seed=0)
    assert {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name} == {"q_proj"}


def test_modules_that_are_not_there_are_refused(make_model: Callable[..., Any]) -> None:
    with pytest.raises(ServeError, match=r"names c_attn, which Qwen2ForCausalLM does not have; .*q_proj"):
        add_adapters(make_model(), LoraSection(rank=2, target_modules=["q_proj", "c_attn"]), torch.float32, seed=0)


def test_a_model_without_linear_modules_is_refused(make_model: Callable[..., Any]) -> None:
    with pytest.raises(ServeError, match="have no linear modules"):
        add_adapters(make_model("GPT2"), LORA, torch.float32, seed=0)
