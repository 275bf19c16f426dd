"""Gradients of a model that may be spread over ranks: their norm, scaling, and the loss scale of float16."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.distributed.tensor import DTensor

from rollwire.learner.distributed import Ranks

_FIRST_SCALE: Final = 2.0**16
_LARGEST_SCALE: Final = 2.0**24
_GROW_AFTER_STEPS: Final = 2000
_CLIP_EPSILON: Final = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


class LossScale:
    """Factor of the loss, so that small gradients do not vanish in float16; 1 for wider types.

    Halved when gradients overflow and doubled after 2000 steps in which they did not, as in mixed precision training
    (Micikevicius et al. 2018, arXiv 1710.03740, sec. 3.2). Powers of two change no digits.

    Attributes:
        value: The present factor.
        finite_steps: Steps without overflow since it changed.
    """

    def __init__(self, precision: str) -> None:
        self.dynamic = precision == "float16"
        self.value = _FIRST_SCALE if self.dynamic else 1.0
        self.finite_steps = 0

    def update(self, finite: bool) -> None:
        """Records an optimizer step: whether its gradients were finite."""
        if not self.dynamic:
            return
        self.finite_steps = self.finite_steps + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.finite_steps == _GROW_AFTER_STEPS:
            self.value, self.finite_steps = min(_LARGEST_SCALE, self.value * 2), 0


class Gradients:
    """The accumulated gradients of a model's trainable parameters.

    Args:
        parameters: Whole tensors, or the shards of this rank as `DTensor`.
        ranks: The ranks that hold shards; all call the methods together.
        scale: Factor that the loss was multiplied by.
        summed: Module and name of parameters whose gradients are added up over the ranks of tensor parallelism first.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        ranks: Ranks | None = None,
        scale: LossScale | None = None,
        summed: Iterable[tuple[nn.Module, str]] = (),
    ) -> None:
        self.scale = scale or LossScale("float32")
        self._parameters = list(parameters)
        self._ranks = ranks or Ranks()
        self._summed = [getattr(module, name) for module, name in summed]

    def norm(self) -> float:
        """Returns the global L2 norm without the loss scale, equal on all ranks; not finite if any gradient is not."""
        self._add_up()
        by_copies: dict[int, list[Tensor]] = defaultdict(list)
        for parameter in self._parameters:
            if parameter.grad is not None:
                by_copies[self._copies(parameter.grad)].append(_local(parameter.grad))
        squares = sum(
            float(torch.nn.utils.get_total_norm(tensors)) ** 2 / copies for copies, tensors in sorted(by_copies.items())
        )
        total = sum(self._ranks.gather(squares))
        return math.sqrt(total) / self.scale.value if total >= 0 else math.nan

    def clip(self, norm: float, max_norm: float) -> None:
        """Takes the loss scale out and scales the gradients down to `max_norm`, where `norm` is what they have."""
        factor = min(1.0, max_norm / (norm + _CLIP_EPSILON)) / self.scale.value
        if factor != 1.0:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    _local(parameter.grad).mul_(factor)

    def _copies(self, gradient: Tensor) -> int:
        """Returns how many ranks hold the same piece of a gradient."""
        if not isinstance(gradient, DTensor):
            return self._ranks.size
        mesh = gradient.device_mesh
        pieces = math.prod(
            mesh.size(dim) for dim, placement in enumerate(gradient.placements) if not placement.is_replicate()
        )
        return self._ranks.size // pieces

    def _add_up(self) -> None:
        meshes = self._ranks.meshes
        if meshes is None or meshes.tensor is None:
            return
        for parameter in self._summed:
            if parameter.grad is not None:
                all_reduce(_local(parameter.grad), group=meshes.tensor.get_group())


def _local(gradient: Any) -> Tensor:
    """Returns this rank's piece; writing to it changes the gradient."""
    piece: Tensor = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return piece
