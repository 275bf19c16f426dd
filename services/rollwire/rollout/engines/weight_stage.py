"""A second set of a model's weights: filled piece by piece while the first one computes, then put in its place at once.

Where pieces go is known from a load that was watched (`weight_copies`). The memory of the set that was replaced holds
the next one, so that after the first time nothing is allocated but what `pack` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace

import torch

from rollwire.rollout.engines.weight_copies import MappedWeights, Part, Parts, same_bits

Pack = Callable[[torch.nn.Module, torch.Tensor], object]
"""Makes what a module computes with from a weight that is not in place yet."""


class CannotStageError(Exception):
    """Parameters share memory, or a tensor cannot be followed to them."""


class WeightStage:
    """The second set.

    Args:
        model: The model that computes.
        parts: Where the pieces of each tensor of the checkpoint are in the model.
        spare: Memory of an earlier set by id of the parameter; what is used is removed.
        complete: True if every piece of every parameter will be filled.
        packed: Name of the attribute that `pack` makes; modules that have it are packed.
        pack: Makes that attribute.

    Attributes:
        differing: Names of tensors of which a piece is not, bit for bit, what was sent.

    """

    def __init__(
        self,
        model: torch.nn.Module,
        parts: Parts,
        spare: dict[int, torch.Tensor],
        *,
        complete: bool,
        packed: str,
        pack: Pack,
    ) -> None:
        self._model = model
        self._parts = parts
        self._spare = spare
        self._complete = complete
        self._packed = packed
        self._pack = pack
        self._owners = {parameter.untyped_storage().data_ptr(): parameter for parameter in model.parameters()}
        self._shadows: dict[int, torch.Tensor] = {}
        self._made: list[tuple[torch.nn.Module, object]] = []
        self.differing: list[str] = []

    def fill(self, source: MappedWeights, transformed: Set[str] = frozenset()) -> Iterator[None]:
        """Copies tensors in and compares them; pauses after every piece.

        Args:
            source: All tensors of the model, or some: the others keep their values.
            transformed: Names of tensors with which the model's loader computes.

        Raises:
            CannotStageError: The model cannot be updated like that.
        """
        if len(self._owners) != sum(1 for _ in self._model.parameters()):
            raise CannotStageError("parameters of the model share memory")
        if not source.tensors.keys() <= self._parts.keys() - transformed:
            raise CannotStageError("no load has shown where all of the tensors belong")
        for name, tensor in source.tensors.items():
            same = True
            for part in self._parts[name]:
                shadow = self._shadow_of(part.destination)
                with torch.no_grad():
                    shadow.copy_(part.of(tensor))
                same = same and same_bits(shadow, part.of(tensor))
                yield
            if not same:
                self.differing.append(name)
        for module in self._model.modules():
            weight = getattr(module, "weight", None)
            unpacked = self._shadows.get(id(weight))
            if hasattr(module, self._packed) and unpacked is not None:
                self._made.append((module, self._pack(module, unpacked)))
                yield

    def flip(self) -> Parts:
        """Puts the second set in place.

        Returns:
            Where the pieces of each tensor are now.
        """
        moved = {}
        for parameter in self._model.parameters():
            shadow = self._shadows.pop(id(parameter), None)
            if shadow is not None:
                moved[parameter.untyped_storage().data_ptr()] = (int(parameter.storage_offset()), shadow)
                self._spare[id(parameter)] = parameter.data
                parameter.data = shadow
        for module, made in self._made:
            setattr(module, self._packed, made)
        return {name: [_moved(part, moved) for part in parts] for name, parts in self._parts.items()}

    def _shadow_of(self, destination: torch.Tensor) -> torch.Tensor:
        """Returns the view that has the place of `destination` in the second set."""
        parameter = self._owners.get(destination.untyped_storage().data_ptr())
        if parameter is None:
            raise CannotStageError("a tensor was loaded into memory that is no parameter")
        if id(parameter) not in self._shadows:
            shadow = self._spare.pop(id(parameter), None)
            if shadow is None or not self._complete:
                # Padding is never sent, and of a fused parameter perhaps only a piece.
                shadow = parameter.detach().clone() if shadow is None else shadow.copy_(parameter.detach())
            if shadow.stride() != parameter.stride():
                raise CannotStageError("a parameter of the model has gaps")
            self._shadows[id(parameter)] = shadow
        return _at(destination, int(parameter.storage_offset()), self._shadows[id(parameter)])


def _at(destination: torch.Tensor, old_start: int, new: torch.Tensor) -> torch.Tensor:
    """Returns the view of a new tensor that `destination` was of the old one, which began at `old_start`."""
    offset = destination.storage_offset() - old_start + new.storage_offset()
    return new.as_strided(destination.shape, destination.stride(), offset)


def _moved(part: Part, moved: Mapping[int, tuple[int, torch.Tensor]]) -> Part:
    place = moved.get(part.destination.untyped_storage().data_ptr())
    return part if place is None else replace(part, destination=_at(part.destination, *place))
