"""What tests of inference engines share: models made from configurations, requests, and what must come out of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

from rollwire.learner.batching import Budget
from rollwire.learner.model import Policy as LearnerPolicy
from rollwire.learner.samples import ScoredSequence
from rollwire.learner.scoring import score
from rollwire.policies import resolve
from rollwire.rollout.engine import Engine, GenerationRequest, Piece, Sampling
from rollwire.rpc.weight_stream import HostTensor
from rollwire.serving.model_tensors import named_weights, to_host
from rollwire.v1 import trajectory_pb2, weights_pb2

VOCABULARY = 97
MAX_TOKENS = 256
SEQUENCES = 16
BUILTIN = "builtin:tiny"
LOGPROB_BOUNDS = {
    ("cpu", "float32"): 1e-4,
    ("cpu", "bfloat16"): 0.05,
    ("cuda", "float32"): 1e-3,
    ("cuda", "bfloat16"): 0.1,
    ("npu", "float32"): 1e-3,
    ("npu", "bfloat16"): 0.1,
}
"""Largest gap between an engine's log-probability of a token and the learner's, by device and `model.dtype`.

Measured on CPU with the models below; for the other devices an estimate. CONTRIBUTING.md has the figures.
"""

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
    """Returns a small model: random weights, biases and norms included, or the policy that ships, changed a little."""
    torch.manual_seed(seed)
    if name == BUILTIN:
        model = transformers.AutoModelForCausalLM.from_pretrained(resolve(name), dtype=torch.float32).eval()
        perturb(model, 0.01 if seed else 0.0)
        return model
    kind, settings = _CONFIGS[name]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**settings)).float().eval()
    perturb(model, 0.05)
    return model


def perturb(model: Any, scale: float = 0.02, only: str = "") -> None:
    """Changes every weight whose name contains `only`."""
    with torch.no_grad():
        for name, tensor in named_weights(model):
            if only in name:
                tensor.add_(torch.randn_like(tensor) * scale)


def host_tensors(model: Any, only: str = "", dtype: torch.dtype | None = None) -> dict[str, HostTensor]:
    """Returns copies of the weights whose names contain `only`, as they travel when served in a type."""
    return {
        name: to_host(tensor.detach().clone(), dtype or model.dtype)
        for name, tensor in named_weights(model)
        if only in name
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


async def complete(engine: Engine, request: GenerationRequest) -> Piece:
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


def gap(model: Any, request: GenerationRequest, piece: Piece) -> float:
    """Returns how far a piece's log-probabilities are from a plain forward pass; 0 for a piece without tokens."""
    expected = reference_logprobs(model, request, piece.token_ids)
    return float((torch.tensor(piece.logprobs) - expected).abs().max()) if piece.token_ids else 0.0


def learner_logprobs(
    policy: LearnerPolicy, drawn: list[tuple[GenerationRequest, Piece]], temperature: float
) -> list[np.ndarray]:
    """Returns what the learner's own scoring says of the tokens of each generation."""
    sequences = []
    for number, (request, piece) in enumerate(drawn):
        tokens = np.array([*request.token_ids, *piece.token_ids], np.int64)
        sequences.append(ScoredSequence(str(number), tokens, np.arange(len(tokens)) >= len(request.token_ids)))
    scores = score(policy, sequences, temperature, Budget(micro_batch_tokens=512, pass_cost_tokens=64))
    return [logprobs[item.loss_mask] for item, (logprobs, _) in zip(sequences, scores, strict=True)]


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """Decodes greedily, one plain forward pass per token."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
