"""Sequences in one row give what sequences in rows of their own give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollwire.learner.batching import Budget
from rollwire.learner.critic import Critic, with_value_head
from rollwire.learner.model import Policy
from rollwire.learner.objective import LossSettings
from rollwire.learner.optimizer import StepOutcome
from rollwire.learner.samples import Sample, pack, pad
from rollwire.learner.scoring import predict, score
from rollwire.learner.step import StepSettings, train_step
from rollwire.serving.server import ServeError

CPU = torch.device("cpu")
ARCHITECTURES = ["Qwen2", "Qwen3", "Llama", "GPT2", "Gemma2", "Cohere", "Granite"]
MakeModel = Callable[..., Any]
MakeSamples = Callable[..., list[Sample]]


class GradientReader:
    """Takes the place of the optimizer: keeps the gradient and changes nothing."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def step(self) -> StepOutcome:
        self.gradients = {name: parameter.grad.clone() for name, parameter in self._model.named_parameters()}
        self._model.zero_grad()
        return StepOutcome(applied=True, grad_norm=1.0, learning_rate=0.0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_scores_and_gradients_are_those_of_padded_sequences(
    architecture: str, attention: str, make_model: MakeModel, make_samples: MakeSamples
) -> None:
    model = make_model(architecture, attn_implementation=attention)
    samples = make_samples(9)
    found = {}
    for packing in ("on", "off"):
        policy, reader = Policy(model, CPU, "float32", packing=packing), GradientReader(model)
        metrics = train_step(
            policy, reader, samples, StepSettings(LossSettings(entropy_coefficient=0.01), 1, 0), Budget(90, 16)
        )
        assert policy.packs == (packing == "on")
        found[packing] = (metrics, reader.gradients, score(policy, samples, 0.8, Budget(90, 16)))

    (metrics, gradients, scores), (padded_metrics, padded_gradients, padded_scores) = found["on"], found["off"]
    assert metrics == pytest.approx(padded_metrics, rel=1e-4, abs=1e-5)
    for name, gradient in padded_gradients.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max() + 1e-6, name
    for left, right in zip(scores, padded_scores, strict=True):
        for ours, theirs in zip(left, right, strict=True):
            assert abs(ours - theirs).max() < 1e-5


def test_a_packed_critic_predicts_the_same(make_model: MakeModel, make_samples: MakeSamples) -> None:
    model = with_value_head(make_model())
    torch.nn.init.normal_(model.get_output_embeddings().weight)
    samples = make_samples(9)

    packed = predict(Critic(model, CPU, "float32", packing="on"), samples, Budget(90, 16))
    padded = predict(Critic(model, CPU, "float32", packing="off"), samples, Budget(90, 16))

    for (ours,), (theirs,) in zip(packed, padded, strict=True):
        assert abs(ours - theirs).max() < 1e-5
        assert abs(theirs).max() > 0.01


def test_a_packed_row_holds_the_sequences_one_after_another(make_samples: MakeSamples) -> None:
    samples = make_samples(3)

    batch, padded = pack(samples, CPU), pad(samples, CPU)

    lengths = [sample.input_tokens for sample in samples]
    assert batch.input_ids.shape == (1, sum(lengths))
    assert batch.position_ids is not None
    assert batch.position_ids[0].tolist() == [place for length in lengths for place in range(length)]
    assert batch.targets.tolist() == padded.targets.tolist()
    before = batch.input_ids.flatten()[batch.sources]
    assert before.tolist() == padded.input_ids.flatten()[padded.sources].tolist()


def test_auto_packs_only_where_attention_has_a_kernel_for_it(make_model: MakeModel) -> None:
    model = make_model(attn_implementation="sdpa")
    assert not Policy(model, CPU, "float32").packs

    model.config._attn_implementation_internal = "flash_attention_2"
    plain = model.base_model.forward
    model.base_model.forward = lambda **inputs: _with("sdpa", model, plain, inputs)
    assert Policy(model, CPU, "float32").packs
    assert not Policy(model, CPU, "float32", packing="off").packs


def _with(attention: str, model: Any, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    """Stands for a kernel that this machine does not have: computes with another."""
    before = model.config._attn_implementation_internal
    model.config._attn_implementation_internal = attention
    try:
        return forward(**inputs)
    finally:
        model.config._attn_implementation_internal = before


def test_a_model_whose_sequences_would_see_each_other_is_refused(make_model: MakeModel) -> None:
    model = make_model()
    plain = model.base_model.forward
    model.base_model.forward = lambda position_ids=None, **inputs: plain(**inputs)

    with pytest.raises(ServeError, match=r"learner.packing is 'on', but sequences of Qwen2ForCausalLM"):
        Policy(model, CPU, "float32", packing="on")
    assert not Policy(model, CPU, "float32", packing="auto").packs
