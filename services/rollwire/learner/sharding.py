"""How a model is spread over ranks: torch's `fully_shard` for each layer and for the rest, layers split where asked.

Every computation with a spread model goes through `Sharding.run`, so that parameters are gathered when they are needed;
every rank must do the same number of such computations. Gradients are added up over ranks, never averaged: the weights
of the loss are global already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from rollwire.learner.distributed import Ranks
from rollwire.learner.tensor_parallel import split_layers
from rollwire.serving.config.sections import LearnerSection

_T = TypeVar("_T")
COMPUTE_TYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The values of `learner.precision`."""
OTHER_LENGTH: Final = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""How far results may be apart, relative to the largest, when sequences of another length take other kernels."""


class _Root(nn.Module):
    """What is sharded as a whole: its forward pass is any computation with the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Any]) -> Any:
        return _owned(compute())


class Sharding:
    """One model on the ranks. The plain object, made without arguments, is a model that is whole on one device.

    Attributes:
        summed: Module and name of parameters whose gradients must be added up over the ranks of tensor parallelism.
    """

    def __init__(self, root: FSDPModule | None = None, *, keep_between_passes: bool = False) -> None:
        self.summed: list[tuple[nn.Module, str]] = []
        self._root: Any = root
        self._keep = keep_between_passes

    def run(self, compute: Callable[[], _T]) -> _T:
        """Returns what `compute` does with the model: tensors, or tuples of them; all ranks call this together."""
        result: _T = compute() if self._root is None else self._root(compute)
        return result

    def outermost(self, model: nn.Module) -> Any:
        """Returns the module to move when the model is to move: what shards it must learn where the shards are then."""
        return model if self._root is None else self._root

    def expect_backward(self, *, last: bool) -> None:
        """Tells that a backward pass comes, and whether it is the last one before the gradients are used."""
        if self._root is None:
            return
        self._root.set_is_last_backward(last)
        if self._keep:
            self._root.set_requires_gradient_sync(last)
            self._root.set_reshard_after_backward(last)

    def reshard(self) -> None:
        """Frees gathered parameters, so that the model's parameters are the shards; after passes without gradient."""
        if self._root is None:
            return
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def spread(model: Any, settings: LearnerSection, ranks: Ranks) -> Sharding:
    """Spreads a model over the ranks in place: its parameters become shards, on the ranks' devices.

    Matrix products run in `settings.precision` under autocast; layers are gathered in it, embeddings, last norm and
    head in float32. Gradients are reduced in float32.

    Args:
        model: The same on all ranks, in host memory.
        settings: How.
        ranks: Who.

    Raises:
        ServeError: The model cannot be split as configured.
    """
    blocks = find_blocks(model)
    if settings.gradient_checkpointing:
        for block in blocks:
            _recompute(block)
    if ranks.meshes is None:
        return Sharding()
    summed = split_layers(model, ranks.meshes.tensor) if ranks.meshes.tensor is not None else []
    on_cpu = ranks.meshes.data.device_type == "cpu"
    offload = CPUOffloadPolicy(pin_memory=not on_cpu) if settings.cpu_offload else OffloadPolicy()
    common: dict[str, Any] = {"mesh": ranks.meshes.data, "offload_policy": offload}
    for block in blocks:
        precision = MixedPrecisionPolicy(
            param_dtype=COMPUTE_TYPES[settings.precision], reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        fully_shard(block, mp_policy=precision, reshard_after_forward=settings.sharding == "zero3", **common)
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    root: Any = fully_shard(_Root(model), mp_policy=whole, reshard_after_forward=False, **common)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
    sharding = Sharding(root, keep_between_passes=settings.sharding == "zero2")
    sharding.summed = summed
    return sharding


def _owned(result: Any) -> Any:
    """Returns tensors that are no views: `fully_shard` watches results to know when the backward pass begins."""
    if isinstance(result, tuple):
        return tuple(map(_owned, result))
    return result.clone() if isinstance(result, torch.Tensor) else result


def find_blocks(model: Any) -> list[nn.Module]:
    """Returns the layers of a transformer: the modules that its architecture names as not to be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if blocks:
        return blocks
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=_size)) if lists else []


def _size(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _recompute(block: nn.Module) -> None:
    """Makes a layer keep only its inputs for the backward pass; nothing random happens in it, for dropout is off."""
    inner = block.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*arguments, **named)
        return torch.utils.checkpoint.checkpoint(
            inner, *arguments, use_reentrant=False, preserve_rng_state=False, **named
        )

    block.forward = forward  # type: ignore[method-assign]
