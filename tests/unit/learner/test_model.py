"""Scores equal the plain forward pass of transformers, for several architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollwire.learner.model import Policy
from rollwire.learner.samples import Sample, pad
from rollwire.serving.server import ServeError

CPU = torch.device("cpu")
ARCHITECTURES = [
    ("Qwen2", {"tie_word_embeddings": True}),
    ("Qwen2", {"tie_word_embeddings": False}),
    ("Qwen3", {}),
    ("Llama", {}),
    ("GPT2", {}),
    ("Gemma2", {"final_logit_softcapping": 3.0}),
    ("Cohere", {"logit_scale": 0.25}),
    ("Granite", {"logits_scaling": 4.0}),
]


def plain_scores(model: Any, sample: Sample, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores one sample by itself, from the logits of the whole model."""
    logits = model(input_ids=torch.from_numpy(sample.token_ids)[None]).logits[0]
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    wanted = [position for position in range(1, len(sample.token_ids)) if sample.loss_mask[position]]
    logprobs = torch.stack([logp[position - 1, int(sample.token_ids[position])] for position in wanted])
    entropies = torch.stack([-(logp[position - 1].exp() * logp[position - 1]).sum() for position in wanted])
    return logprobs, entropies


@pytest.mark.parametrize(("architecture", "changes"), ARCHITECTURES)
def test_scores_of_a_padded_batch_are_those_of_each_sample_alone(
    architecture: str,
    changes: dict[str, Any],
    make_model: Callable[..., Any],
    make_samples: Callable[..., list[Sample]],
) -> None:
    model = make_model(architecture, **changes)
    samples = make_samples(6)
    policy = Policy(model, CPU, "float32")

    with torch.no_grad():
        found = policy.token_scores(pad(samples, CPU), temperature=0.8)
        expected = [plain_scores(model, sample, 0.8) for sample in samples]

    assert policy.head_is_separable
    torch.testing.assert_close(found.logprobs, torch.cat([part[0] for part in expected]), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropies, torch.cat([part[1] for part in expected]), rtol=0, atol=1e-5)


def test_an_unknown_rescaling_of_the_logits_takes_the_whole_forward_pass(
    make_model: Callable[..., Any], make_samples: Callable[..., list[Sample]]
) -> None:
    model = make_model()
    plain_forward = model.forward

    def rescaled(**arguments: Any) -> Any:
        output = plain_forward(**arguments)
        output.logits = output.logits.sin()
        return output

    model.forward = rescaled
    samples = make_samples(3)
    policy = Policy(model, CPU, "float32")

    with torch.no_grad():
        found = policy.token_scores(pad(samples, CPU), temperature=1.0)
        expected = torch.cat([plain_scores(model, sample, 1.0)[0] for sample in samples])

    assert not policy.head_is_separable
    torch.testing.assert_close(found.logprobs, expected, rtol=0, atol=1e-5)


def test_logits_are_computed_only_where_they_are_wanted(
    make_model: Callable[..., Any], make_samples: Callable[..., list[Sample]]
) -> None:
    policy = Policy(make_model(), CPU, "float32")
    samples = make_samples(4)
    seen = []
    policy.model.get_output_embeddings().register_forward_hook(
        lambda module, arguments, output: seen.append(output.shape[0])
    )

    policy.token_scores(pad(samples, CPU), temperature=1.0)

    assert seen == [sum(sample.targets for sample in samples)]


def test_bfloat16_is_close_and_keeps_float32_masters(
    make_model: Callable[..., Any], make_samples: Callable[..., list[Sample]]
) -> None:
    batch = pad(make_samples(4), CPU)
    exact = Policy(make_model(), CPU, "float32").token_scores(batch, 1.0)
    policy = Policy(make_model(), CPU, "bfloat16")

    rounded = policy.token_scores(batch, 1.0)
    rounded.logprobs.sum().backward()

    assert 0 < (rounded.logprobs - exact.logprobs).abs().max() < 0.2
    for parameter in policy.model.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32


def test_a_model_that_looks_ahead_is_refused(make_model: Callable[..., Any]) -> None:
    model = make_model(attn_implementation="eager")
    plain_forward = model.forward
    model.forward = lambda **arguments: _sees_the_last_token(plain_forward, **arguments)

    with pytest.raises(ServeError, match="not causal"):
        Policy(model, CPU, "float32")


def _sees_the_last_token(plain_forward: Callable[..., Any], **arguments: Any) -> Any:
    output = plain_forward(**arguments)
    output.logits = output.logits + output.logits[:, -1:]
    return output


def test_damaged_weights_are_refused(make_model: Callable[..., Any]) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")

    with pytest.raises(ServeError, match="not finite"):
        Policy(model, CPU, "float32")


def test_tied_parameters_count_once(make_model: Callable[..., Any]) -> None:
    tied = Policy(make_model(tie_word_embeddings=True), CPU, "float32")
    untied = Policy(make_model(tie_word_embeddings=False), CPU, "float32")

    assert untied.parameters - tied.parameters == untied.model.lm_head.weight.numel()
    assert tied.position_limit == 128
