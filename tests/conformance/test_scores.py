"""Tokens and log-probabilities are those of the weights: a plain forward pass, and the learner's own scoring."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import engine_kit as kit
import numpy as np
import pytest
import torch

from rollwire.learner.model import Policy as LearnerPolicy
from rollwire.rollout.engine import GenerationRequest
from rollwire.serving.model_tensors import SERVING_TYPES
from rollwire.v1 import trajectory_pb2

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
RAW = trajectory_pb2.LOGPROB_MODE_RAW
PROMPT = [(7 * position + 3) % 90 for position in range(41)]
MODELS = ["qwen2_tied", "llama_untied", kit.BUILTIN]
# Temperature, top-p, top-k.
SETTINGS = [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 0.8, 0), (1.0, 1.0, 5), (0.7, 0.9, 20), (0.0, 1.0, 0)]


def requests(max_tokens: int, **changes: Any) -> list[GenerationRequest]:
    """Prompts of many lengths, each with a seed of its own."""
    return [
        GenerationRequest(PROMPT[: 1 + 5 * index], kit.sampling(max_tokens, **changes), 100 + index, kit.MAX_TOKENS)
        for index in range(8)
    ]


@pytest.mark.parametrize("model_name", MODELS)
async def test_greedy_tokens_are_the_argmax(subject: Any) -> None:
    """So they are the same for every engine."""
    asked = requests(12, temperature=0.0)
    pieces = await asyncio.gather(*(kit.complete(subject.engine, request) for request in asked))
    for request, piece in zip(asked, pieces, strict=True):
        assert piece.token_ids == kit.greedy_tokens(subject.model, list(request.token_ids), 12)
        assert piece.logprobs == [0.0] * 12


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("model_name", "dtype"), [*((name, "float32") for name in MODELS), ("qwen2_tied", "bfloat16")])
async def test_log_probabilities_are_the_learners(subject: Any, temperature: float, record_property: Any) -> None:
    """In bfloat16 the learner computes under autocast from float32 weights, the engine from rounded ones."""
    asked = requests(40, temperature=temperature)
    pieces = await asyncio.gather(*(kit.complete(subject.engine, request) for request in asked))
    device = torch.device(subject.engine.description.device)
    learner = LearnerPolicy(copy.deepcopy(subject.model).to(device), device, subject.dtype)
    expected = kit.learner_logprobs(learner, list(zip(asked, pieces, strict=True)), temperature)
    gaps = np.concatenate([np.abs(piece.logprobs - one) for piece, one in zip(pieces, expected, strict=True)])
    assert len(gaps) == 8 * 40
    record_property("largest gap", float(gaps.max()))
    assert gaps.max() < subject.bound
    # A distribution without its temperature is off by more, so the comparison tells them apart.
    others = kit.learner_logprobs(learner, list(zip(asked, pieces, strict=True)), 1.7 - temperature)
    assert np.abs(np.concatenate(others) - np.concatenate(expected)).max() > subject.bound


@pytest.mark.parametrize("model_name", MODELS)
async def test_every_way_to_sample_in_one_batch(subject: Any) -> None:
    """Under top-k and top-p the log-probability is that of the distribution drawn from, renormalised."""
    asked = [
        GenerationRequest(
            PROMPT[: 40 - index], kit.sampling(8, temperature=temperature, top_p=top_p, top_k=top_k, **mode), index, 256
        )
        for mode in ({}, {"logprob_mode": RAW})
        for index, (temperature, top_p, top_k) in enumerate(SETTINGS)
    ]
    pieces = await asyncio.gather(*(kit.complete(subject.engine, request) for request in asked))
    for request, piece in zip(asked, pieces, strict=True):
        assert kit.gap(subject.model, request, piece) < subject.bound, request.sampling
        assert piece.version == subject.version


@pytest.mark.parametrize("dtype", ["bfloat16"])
async def test_bfloat16_is_as_a_plain_forward_pass_in_bfloat16(subject: Any) -> None:
    model = copy.deepcopy(subject.model).to(SERVING_TYPES[subject.dtype])
    asked = requests(20)
    for request in asked:
        assert kit.gap(model, request, await kit.complete(subject.engine, request)) < subject.bound


async def test_what_was_drawn_follows_the_distribution(subject: Any) -> None:
    """The mean log-probability of many draws is minus the entropy, to six standard errors."""
    asked = [GenerationRequest(PROMPT[:20], kit.sampling(1), seed, kit.MAX_TOKENS) for seed in range(800)]
    pieces = await asyncio.gather(*(kit.complete(subject.engine, request) for request in asked))
    with torch.no_grad():
        logp_V = subject.model(torch.tensor([PROMPT[:20]])).logits[0, -1].log_softmax(-1)
    entropy = float(-(logp_V.exp() * logp_V).sum())
    spread = float((logp_V.exp() * (logp_V + entropy) ** 2).sum().sqrt())
    drawn = np.array([piece.logprobs[0] for piece in pieces])
    assert abs(drawn.mean() + entropy) < 6 * spread / np.sqrt(len(drawn))
    counts = np.bincount([piece.token_ids[0] for piece in pieces], minlength=len(logp_V))
    likely = int(logp_V.argmax())
    share = float(logp_V.exp()[likely])
    assert abs(counts[likely] / 800 - share) < 6 * np.sqrt(share * (1 - share) / 800)
