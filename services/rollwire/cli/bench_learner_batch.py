"""What `rollwire bench learner` trains: models of named sizes, and a batch whose lengths are as skewed as episodes'."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollwire.serving.config import ConfigError

SHORTEST_TOKENS: Final = 32
LONGEST_TOKENS: Final = 1024
_MEDIAN_TOKENS: Final = 160
_SPREAD: Final = 0.9  # standard deviation of the logarithm of the length
_PROMPT_SHARE: Final = 4
_LOGPROB_NOISE: Final = 0.1
_CUSTOM: Final = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,2})")
_HEAD_SIZE: Final = 64


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer with tied embeddings.

    Attributes:
        hidden_size: Width of the residual stream.
        layers: Number of layers.
        intermediate_size: Width of the feed-forward part.
        heads: Attention heads.
        key_value_heads: Heads of keys and values.
    """

    hidden_size: int
    layers: int
    intermediate_size: int
    heads: int
    key_value_heads: int


SIZES: Final = {
    "10m": Shape(64, 4, 256, 2, 1),
    "100m": Shape(512, 8, 1408, 8, 2),
    "500m": Shape(896, 24, 4864, 14, 2),  # those of Qwen2.5-0.5B
}
"""By name, which says about how many parameters there are with a vocabulary of 150,000."""


@dataclass(frozen=True)
class Rollout:
    """A prompt and a response that was drawn for it.

    Attributes:
        token_ids: int64[L].
        prompt_tokens: The response begins here, >= 1.
        advantage: Of every token of the response.
        logprobs: float32[L]; log-probability of each token when it was drawn, read in the response.
    """

    token_ids: NDArray[np.int64]
    prompt_tokens: int
    advantage: float
    logprobs: NDArray[np.float32]


def read_sizes(text: str) -> dict[str, Shape]:
    """Returns the shapes of a comma-separated list of names, or of `HIDDENxLAYERS`.

    Raises:
        ConfigError: There is no such shape.
    """
    found = {}
    for name in text.split(","):
        custom = _CUSTOM.fullmatch(name)
        if name in SIZES:
            found[name] = SIZES[name]
        elif custom is not None and int(custom[1]) % _HEAD_SIZE == 0:
            hidden = int(custom[1])
            found[name] = Shape(hidden, int(custom[2]), 3 * hidden, hidden // _HEAD_SIZE, 1)
        else:
            raise ConfigError(
                f"--sizes has {name!r}; allowed: {', '.join(SIZES)}, or HIDDENxLAYERS where HIDDEN is a multiple of "
                f"{_HEAD_SIZE}"
            )
    return found


def make_model(shape: Shape, vocabulary: int) -> Any:
    """Returns a model with random weights in float32, the same whenever the arguments are."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=2 * LONGEST_TOKENS,
        tie_word_embeddings=True,
        pad_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config).float()


def draw_batch(count: int, vocabulary: int, seed: int) -> list[Rollout]:
    """Returns rollouts whose lengths have a log-normal distribution; log-probabilities are still zero."""
    random = np.random.default_rng(seed)
    lengths = random.lognormal(np.log(_MEDIAN_TOKENS), _SPREAD, count).clip(SHORTEST_TOKENS, LONGEST_TOKENS).astype(int)
    return [
        Rollout(
            random.integers(0, vocabulary, length),
            int(length) // _PROMPT_SHARE,
            float(random.normal()),
            np.zeros(length, np.float32),
        )
        for length in lengths
    ]


def drawn_by(batch: list[Rollout], logprobs: list[NDArray[np.float32]], seed: int) -> list[Rollout]:
    """Returns the batch as if an engine with a little noise had drawn it: few ratios are clipped then."""
    random = np.random.default_rng(seed)
    return [
        Rollout(
            item.token_ids,
            item.prompt_tokens,
            item.advantage,
            own + random.normal(0, _LOGPROB_NOISE, len(own)).astype(np.float32),
        )
        for item, own in zip(batch, logprobs, strict=True)
    ]
