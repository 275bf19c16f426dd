"""Splits the matrices of a dense transformer over ranks by the plan that transformers has for its architecture.

Column-wise and row-wise layers are torch's own (`parallelize_module`); the plan says which is which. Embeddings and the
output head stay whole on every rank, and so do norms: those see the same values everywhere and get the same gradient,
except a norm between split layers (such as Qwen3's of queries and keys), whose gradient is the sum over the ranks.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from rollwire.serving.server import ServeError

_STYLES: Final[dict[str, type[ParallelStyle]]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_WHOLE: Final = ("replicated_with_grad_allreduce", "embedding_rowwise")
# Says at every gathering of weights that it takes two steps; it must, for they are split twice.
_TALKATIVE: Final = "torch.distributed.tensor._redistribute"


def split_layers(model: Any, mesh: DeviceMesh) -> list[tuple[nn.Module, str]]:
    """Splits a model in place.

    Returns:
        Module and name of each parameter that is whole but whose gradient must be added up over the mesh.

    Raises:
        ServeError: The architecture has no plan, or its sizes cannot be divided.
    """
    base = model.base_model
    styles = _planned(model, base)
    _check_sizes(model, base, styles, mesh.size())
    plan = {name: _STYLES[style]() for name, style in styles.items()}
    parents = {name.rpartition(".")[0] for name in plan}
    summed = [
        (module, parameter)
        for name, module in base.named_modules()
        if name not in plan and name.rpartition(".")[0] in parents and not any(module.children())
        for parameter, _ in module.named_parameters(recurse=False)
    ]
    logging.getLogger(_TALKATIVE).setLevel(logging.ERROR)
    parallelize_module(base, mesh, plan)
    return summed


def _planned(model: Any, base: Any) -> dict[str, str]:
    """Returns the style of each layer that is to be split, by its name below the base model."""
    plan: dict[str, str] = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    if not plan:
        raise ServeError(
            f"learner.tensor_parallel_size is more than 1, but transformers has no plan for {type(model).__name__}; "
            "set it to 1 and shard with learner.sharding=zero3"
        )
    foreign = sorted({style for style in plan.values() if style not in _STYLES and style not in _WHOLE})
    if foreign:
        raise ServeError(
            f"learner.tensor_parallel_size is more than 1, but the plan of {type(model).__name__} has layers of the "
            f"kind {foreign[0]}; dense models with colwise and rowwise layers can be split. Set it to 1"
        )
    patterns = [(re.compile(re.escape(name).replace(r"\*", r"\d+")), style) for name, style in plan.items()]
    return {
        name: style
        for name, _ in base.named_modules()
        for pattern, style in patterns
        if style in _STYLES and pattern.fullmatch(name)
    }


def _check_sizes(model: Any, base: Any, styles: dict[str, str], size: int) -> None:
    config = model.config.get_text_config()
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if heads is not None and heads % size:
            raise ServeError(
                f"learner.tensor_parallel_size is {size}, which does not divide the model's {field}={heads}; "
                "choose a divisor"
            )
    for name, style in styles.items():
        layer = base.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise ServeError(
                f"learner.tensor_parallel_size is more than 1, but {name} is a {type(layer).__name__}, which cannot be "
                "split; set it to 1"
            )
        width = layer.out_features if style == "colwise" else layer.in_features
        if width % size:
            raise ServeError(
                f"learner.tensor_parallel_size is {size}, which does not divide the {width} features of {name}; "
                "choose a divisor"
            )
