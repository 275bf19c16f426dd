"""Which tensors a checkpoint has, without loading it: the model is made on the meta device, as the learner makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rollwire.rpc.weight_stream import TensorLayout
from rollwire.serving.model_tensors import layouts, named_weights


@dataclass(frozen=True)
class CheckpointNames:
    """Facts about the weights of an architecture.

    Attributes:
        architecture: Class of the model in transformers.
        layouts: Layout of every weight on the wire, by name.
        aliases: Further names under which checkpoints may have a tied tensor: alias to its name in `layouts`.
    """

    architecture: str
    layouts: dict[str, TensorLayout]
    aliases: dict[str, str]


def checkpoint_names(config: Any, serving_dtype: torch.dtype) -> CheckpointNames:
    """Returns names and layouts of the weights of a model.

    Args:
        config: `transformers.PretrainedConfig` of a causal language model.
        serving_dtype: Type in which floating-point weights travel.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=serving_dtype)
    names = {id(tensor): name for name, tensor in named_weights(model)}
    every = model.state_dict(keep_vars=True).items()
    aliases = {alias: names[id(tensor)] for alias, tensor in every if names.get(id(tensor), alias) != alias}
    return CheckpointNames(type(model).__name__, layouts(model, serving_dtype), aliases)
