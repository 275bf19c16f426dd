"""The parameters that `rollwire bench weights` moves: shapes of a transformer, values and changes as in training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rollwire.rpc.weight_publisher import PublishedTensor
from rollwire.rpc.weight_stream import TensorLayout
from rollwire.serving.server import ServeError
from rollwire.v1 import weights_pb2

ONE_ULP_SHARE: Final = 0.9
"""Share of the changed values that move to the next or previous bfloat16; the others become something else."""

_POOL_VALUES: Final = 1 << 22
_BLOCK_VALUES: Final = 1 << 20
_WEIGHT_SCALE: Final = 0.02

Parameters = dict[str, npt.NDArray[np.uint16]]
"""Bit patterns of bfloat16 values, flat, by name."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes as a transformers `config.json` names them; the defaults give 505 MB of bfloat16."""

    hidden_size: int = 896
    intermediate_size: int = 4864
    num_hidden_layers: int = 13
    vocab_size: int = 65_536
    num_attention_heads: int = 14
    num_key_value_heads: int = 2
    tie_word_embeddings: bool = True

    @classmethod
    def read(cls, path: Path) -> ModelShape:
        """Reads a `config.json`.

        Raises:
            ServeError: It cannot be read, or one of the sizes is missing or not a positive number.
        """
        try:
            found: dict[str, Any] = dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ServeError(f"{path} cannot be read as a model's config.json: {error}") from error
        found.setdefault("num_key_value_heads", found.get("num_attention_heads"))
        found.setdefault("tie_word_embeddings", True)
        for name in cls.__dataclass_fields__:
            if not isinstance(found.get(name), int) or (name != "tie_word_embeddings" and found[name] < 1):
                raise ServeError(
                    f"{path}: {name} is {found.get(name)!r}; needed is a positive number, as the config.json of a "
                    "decoder-only model has it"
                )
        return cls(**{name: found[name] for name in cls.__dataclass_fields__})

    def layouts(self) -> dict[str, TensorLayout]:
        """Returns the layout of each parameter, in the order that transformers has them."""
        hidden, wide = self.hidden_size, self.intermediate_size
        key_value = hidden // self.num_attention_heads * self.num_key_value_heads
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_hidden_layers):
            block = {
                "self_attn.q_proj.weight": (hidden, hidden),
                "self_attn.k_proj.weight": (key_value, hidden),
                "self_attn.v_proj.weight": (key_value, hidden),
                "self_attn.o_proj.weight": (hidden, hidden),
                "mlp.gate_proj.weight": (wide, hidden),
                "mlp.up_proj.weight": (wide, hidden),
                "mlp.down_proj.weight": (hidden, wide),
                "input_layernorm.weight": (hidden,),
                "post_attention_layernorm.weight": (hidden,),
            }
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return {name: TensorLayout(weights_pb2.DATA_TYPE_BFLOAT16, shape) for name, shape in shapes.items()}


def make_parameters(layouts: dict[str, TensorLayout], generator: np.random.Generator) -> Parameters:
    """Draws values: normal, of the size that trained weights have."""
    normal = _WEIGHT_SCALE * generator.standard_normal(_POOL_VALUES, dtype=np.float32)
    pool = (normal.view(np.uint32) >> 16).astype(np.uint16)
    parameters = {name: np.empty(layout.elements, np.uint16) for name, layout in layouts.items()}
    for words in parameters.values():
        for block in _blocks(words):
            start = int(generator.integers(_POOL_VALUES - len(block) + 1))
            block[:] = pool[start : start + len(block)]
    return parameters


def change(
    parameters: Parameters, share: float, generator: np.random.Generator, one_ulp_share: float = ONE_ULP_SHARE
) -> None:
    """Changes about this share of the values of every parameter, in place.

    Args:
        parameters: The parameters.
        share: Share of the values that are changed.
        generator: Draws which ones, and how.
        one_ulp_share: Share of these that move to a neighbouring value; with 1 a model stays one that can compute.
    """
    for words in parameters.values():
        for block in _blocks(words):
            index = generator.integers(0, len(block), round(share * len(block)))
            step = np.where(generator.random(len(index)) < 0.5, 1, 0xFFFF).astype(np.uint16)
            other = generator.integers(1, 1 << 16, len(index), dtype=np.uint16)
            block[index] += np.where(generator.random(len(index)) < one_ulp_share, step, other)


def published(parameters: Parameters, layouts: dict[str, TensorLayout]) -> Iterator[PublishedTensor]:
    """Yields the parameters as a learner publishes them."""
    for name, words in parameters.items():
        yield name, layouts[name], [words.data.cast("B")]


def _blocks(words: npt.NDArray[np.uint16]) -> Iterator[npt.NDArray[np.uint16]]:
    """Yields the values in blocks, so that what is computed from them stays small beside the model."""
    for start in range(0, len(words), _BLOCK_VALUES):
        yield words[start : start + _BLOCK_VALUES]
