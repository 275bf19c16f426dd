"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): the base is frozen, and W = W0 + (alpha / r)·B·A is published.

Adapters are peft's, put into the model in place. Base weights are rounded to the serving dtype when they are loaded, so
that learner and rollout servers have the same W0. The learner computes with base and adapters apart and in float32;
what is published is merged and rounded to the serving dtype, so the two differ by that rounding.

The merge uses multiplications and additions of single elements in a fixed order and nothing else: IEEE 754 says what
they give, so it is bit for bit the same on every machine, which no matrix product is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from rollwire.learner.sharding import find_blocks
from rollwire.serving.config.sections import LoraSection
from rollwire.serving.model_tensors import named_weights
from rollwire.serving.server import ServeError

_ADAPTER: Final = "default"
_WRAPPED: Final = ".base_layer."
_PARTS: Final = (".lora_A.", ".lora_B.")


@dataclass(frozen=True)
class Adapter:
    """What is added to one matrix of M rows and N columns: scale · B · A.

    Attributes:
        down: A, float32[r, N].
        up: B, float32[M, r].
        scale: alpha / r.
    """

    down: Tensor
    up: Tensor
    scale: float


def add_adapters(model: Any, settings: LoraSection, serving_dtype: torch.dtype, seed: int) -> None:
    """Freezes a model in place, rounds it to the serving dtype and puts adapters into it, which change nothing yet.

    Args:
        model: A whole model; the same on all ranks.
        settings: `rank` is > 0.
        serving_dtype: Element type that weights are published in.
        seed: Determines A; B is zero.

    Raises:
        ServeError: peft is not installed, or the model has no such layers.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ServeError(
            f"learner.lora.rank is {settings.rank}, which needs the package peft; install rollwire[lora]"
        ) from error
    targets = _targets(model, settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.copy_(parameter.to(serving_dtype))
    model.requires_grad_(False)
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=targets, lora_dropout=0.0, bias="none"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, _ADAPTER)
    model.eval()


def served_name(name: str) -> str | None:
    """Returns the name that a weight has on the wire; None for one of an adapter, which is merged into another."""
    return None if any(part in name for part in _PARTS) else name.replace(_WRAPPED, ".")


def served_weights(model: Any) -> Iterator[tuple[str, str, Tensor, Adapter | None]]:
    """Yields, for each published weight, its name on the wire, its name in the model, its base and its adapter."""
    adapters = {}
    for path, module in model.named_modules():
        if _ADAPTER in getattr(module, "lora_A", ()):
            adapters[f"{path}{_WRAPPED}weight"] = Adapter(
                module.lora_A[_ADAPTER].weight, module.lora_B[_ADAPTER].weight, float(module.scaling[_ADAPTER])
            )
    for name, tensor in named_weights(model):
        served = served_name(name)
        if served is not None:
            yield served, name, tensor, adapters.get(name)


def merged_rows(base: Tensor, adapter: Adapter, first: int, last: int) -> Tensor:
    """Returns rows `first` to `last` of W0 + scale·B·A in float32, the same bits on every machine.

    `rpc.weight_low_rank.merge_low_rank` gives them in numpy, where readers merge; this one runs on the model's device.

    Args:
        base: W0[M, N] in any floating-point type.
        adapter: B and A, whole and on the same device.
        first: First row.
        last: Row after the last one.
    """
    rows = unsigned_zeros(base[first:last].detach().float())
    factors = adapter.up[first:last].detach() * adapter.scale
    for index in range(adapter.down.shape[0]):
        rows.add_(factors[:, index : index + 1] * adapter.down[index].detach())
    return rows


def unsigned_zeros(base: Tensor) -> Tensor:
    """Returns a copy of W0 in which every zero is positive, so that adding 0·A changes no bit of it."""
    return base + 0.0


def _targets(model: Any, settings: LoraSection) -> list[str]:
    """Returns the full names of the layers that get adapters."""
    paths = {id(module): path for path, module in model.named_modules()}
    linear = [
        paths[id(module)] for block in find_blocks(model) for module in block.modules() if type(module) is nn.Linear
    ]
    wanted = settings.target_modules
    if wanted == "auto":
        found = linear
    else:
        found = [path for path in linear if path.rpartition(".")[2] in wanted]
        missing = sorted(set(wanted) - {path.rpartition(".")[2] for path in found})
        if missing:
            known = ", ".join(sorted({path.rpartition(".")[2] for path in linear})) or "none"
            raise ServeError(
                f"learner.lora.target_modules names {', '.join(missing)}, which {type(model).__name__} does not have; "
                f"its layers' linear modules are: {known}"
            )
    if not found:
        raise ServeError(
            f"learner.lora.rank is {settings.rank}, but the layers of {type(model).__name__} have no linear modules "
            "that adapters could be put into; set learner.lora.rank=0"
        )
    return found
