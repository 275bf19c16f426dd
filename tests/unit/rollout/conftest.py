"""Small random models of several architectures, and plain forward passes to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

VOCABULARY = 97

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Name to configuration class and settings.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {**_COMMON, "tie_word_embeddings": True}),
    "llama": ("LlamaConfig", _COMMON),
    "gemma": ("GemmaConfig", {**_COMMON, "head_dim": 8, "tie_word_embeddings": True}),
    "mistral_window": ("MistralConfig", {**_COMMON, "sliding_window": 9}),
    "gemma2_softcap": ("Gemma2Config", {**_COMMON, "head_dim": 8, "sliding_window": 9}),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "mamba": (
        "MambaConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """Returns a maker of models by name; weights are spread out, so that distributions are far from uniform."""

    def make(name: str = "qwen2", seed: int = 0) -> Any:
        kind, settings = _CONFIGS[name]
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**settings)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(4.0)
        return model

    return make


@pytest.fixture
def plain_logprobs() -> Callable[..., list[float]]:
    """Returns a function that scores tokens with one ordinary, unbatched forward pass of a model."""

    def score(model: Any, tokens: list[int], begin: int) -> list[float]:
        """Log-probabilities of `tokens[begin:]`, each given all tokens before it."""
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
        chosen = logits[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        return [float(value) for value in chosen[begin - 1 :]]

    return score
