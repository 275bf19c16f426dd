"""Tiny models of several architectures, and random samples for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollwire.learner.samples import Sample

VOCABULARY = 61


def _config(architecture: str, **changes: Any) -> Any:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if architecture == "GPT2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    if architecture in ("Gemma2", "Qwen3"):
        sizes["head_dim"] = 8
    return getattr(transformers, f"{architecture}Config")(**{**sizes, **changes})


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """Returns a maker of freshly initialised models; the same arguments give the same weights."""

    def make(architecture: str = "Qwen2", seed: int = 0, **changes: Any) -> Any:
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(_config(architecture, **changes)).float().eval()
        with torch.no_grad():  # the default initialisation gives nearly uniform predictions, which hides mistakes
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(4)
        return model

    return make


@pytest.fixture
def make_samples() -> Callable[..., list[Sample]]:
    """Returns a maker of random samples with responses in several turns."""

    def make(count: int = 7, seed: int = 0, shortest: int = 5, longest: int = 40) -> list[Sample]:
        random = np.random.default_rng(seed)
        samples = []
        for number in range(count):
            length = int(random.integers(shortest, longest + 1))
            loss_mask = random.random(length) < 0.4
            loss_mask[0] = False
            loss_mask[int(random.integers(1, length))] = True
            samples.append(
                Sample(
                    sample_id=f"sample-{number}",
                    token_ids=random.integers(0, VOCABULARY, length),
                    loss_mask=loss_mask,
                    advantages=random.normal(size=length).astype(np.float32),
                    logprobs=(-4 + random.normal(size=length) * 0.3).astype(np.float32),
                )
            )
        return samples

    return make
