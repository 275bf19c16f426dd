"""Tests that need vLLM; run in an environment that has it (`make test-vllm`), otherwise not collected."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
import transformers

from rollwire.rollout.engine import GenerationRequest, Piece, Sampling
from rollwire.rollout.engines.vllm_engine import VllmEngine
from rollwire.rpc.weight_stream import HostTensor
from rollwire.serving.config.sections import ModelSection
from rollwire.serving.model_tensors import named_weights, to_host
from rollwire.v1 import trajectory_pb2, weights_pb2

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

VOCABULARY = 97
MAX_TOKENS = 256
SEQUENCES = 16

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_tied": ("Qwen2Config", {**_COMMON, "vocab_size": VOCABULARY, "tie_word_embeddings": True}),
    "llama_untied": ("LlamaConfig", {**_COMMON, "vocab_size": 100, "tie_word_embeddings": False}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_COMMON, "vocab_size": 100, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gemma2_tied": ("Gemma2Config", {**_COMMON, "vocab_size": 160_000, "sliding_window": 32}),
    "gemma3_tied": ("Gemma3TextConfig", {**_COMMON, "vocab_size": 160_000, "sliding_window": 32}),
}


def make_model(name: str, seed: int = 0) -> Any:
    """Returns a small model with random weights, biases and norms included."""
    kind, settings = _CONFIGS[name]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**settings)).float().eval()
    perturb(model, 0.05)
    return model


def perturb(model: Any, scale: float = 0.02, only: str = "") -> None:
    """Changes every weight whose name contains `only`."""
    with torch.no_grad():
        for name, tensor in named_weights(model):
            if only in name:
                tensor.add_(torch.randn_like(tensor) * scale)


def host_tensors(model: Any, only: str = "") -> dict[str, HostTensor]:
    """Returns copies of the weights whose names contain `only`."""
    return {
        name: to_host(tensor.detach().clone(), model.dtype) for name, tensor in named_weights(model) if only in name
    }


def version(step: int) -> weights_pb2.WeightVersion:
    """Returns a version of the tests' lineage."""
    return weights_pb2.WeightVersion(lineage="main", step=step)


def sampling(max_tokens: int = 8, **changes: Any) -> Sampling:
    """Returns plain sampling at temperature 1 without stop tokens, with changes."""
    settings: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "stop_token_ids": frozenset(),
        "logprob_mode": trajectory_pb2.LOGPROB_MODE_SAMPLED,
    }
    return Sampling(max_tokens=max_tokens, **{**settings, **changes})


async def complete(engine: VllmEngine, request: GenerationRequest) -> Piece:
    """Runs a generation that is not streamed."""
    pieces = [piece async for piece in engine.generate(request)]
    assert len(pieces) == 1
    return pieces[0]


def reference_logprobs(model: Any, request: GenerationRequest, drawn: list[int]) -> torch.Tensor:
    """Returns what a plain forward pass says of drawn tokens; top-k and top-p as `Sampling` defines them."""
    tokens = [*request.token_ids, *drawn]
    with torch.no_grad():
        logits_TV = model(torch.tensor([tokens])).logits[0, len(request.token_ids) - 1 : -1].float()
    settings = request.sampling
    if settings.logprob_mode != trajectory_pb2.LOGPROB_MODE_RAW:
        if settings.temperature == 0:
            return torch.zeros(len(drawn))
        logits_TV = logits_TV / settings.temperature
        ordered_TV, order_TV = logits_TV.sort(dim=-1, descending=True)
        if settings.top_k:
            ordered_TV[:, settings.top_k :] = -torch.inf
        before_TV = ordered_TV.softmax(-1).cumsum(-1) - ordered_TV.softmax(-1)
        ordered_TV[before_TV >= settings.top_p] = -torch.inf
        logits_TV = torch.empty_like(logits_TV).scatter_(1, order_TV, ordered_TV)
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(drawn)[:, None])[:, 0]


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """Decodes greedily, one plain forward pass per token."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def kit() -> Any:
    """This module: what the tests share."""
    return sys.modules[__name__]


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Saves a model once and returns its directory."""
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make_model(name).save_pretrained(made[name])
        return made[name]

    return directory


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_engine(model_directory: Callable[[str], Path]) -> AsyncIterator[VllmEngine]:
    """One running engine for all tests that leave it running; starting one takes seconds."""
    from rollwire.rollout.engines.vllm_start import start_vllm_engine

    engine = await start_vllm_engine(
        ModelSection(path=str(model_directory("qwen2_tied"))),
        device="cpu",
        max_sequence_tokens=MAX_TOKENS,
        max_concurrent_sequences=SEQUENCES,
    )
    yield engine
    await engine.close()
