"""Keys and values of all layers in slots of equal capacity, one sequence per slot.

The tokens of a slot lie one after the other, so that writing a whole pass is one indexed copy per layer and reading a
sequence is a view. The capacity starts small and doubles up to the limit: memory follows the longest sequence in use.

Legend: C layers, S slots, P positions per slot (the capacity), K key-value heads, D head size, N tokens of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

_INITIAL_TOKENS: Final = 256


@dataclass(frozen=True)
class CacheShape:
    """What one layer stores per token.

    Attributes:
        layers: Number of layers.
        heads: Key-value heads.
        key_size: Elements of a key.
        value_size: Elements of a value.
        dtype: Element type.
    """

    layers: int
    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype


class SlotCache:
    """The cache.

    Args:
        shape: What is stored.
        slots: Number of slots.
        max_tokens: Longest sequence.
        device: Where the cache lives.
    """

    def __init__(self, shape: CacheShape, slots: int, max_tokens: int, device: torch.device) -> None:
        self._shape = shape
        self._slots = slots
        self._max_tokens = max_tokens
        self._device = device
        self.capacity_tokens = 0
        self._keys_CSPKD, self._values_CSPKD = self._allocate(0)

    def reserve(self, tokens: int) -> None:
        """Grows every slot to hold at least `tokens`; what is stored stays."""
        if tokens <= self.capacity_tokens:
            return
        capacity = max(_INITIAL_TOKENS, self.capacity_tokens)
        while capacity < tokens:
            capacity *= 2
        capacity = max(tokens, min(capacity, self._max_tokens))
        keys_CSPKD, values_CSPKD = self._allocate(capacity)
        keys_CSPKD[:, :, : self.capacity_tokens] = self._keys_CSPKD
        values_CSPKD[:, :, : self.capacity_tokens] = self._values_CSPKD
        self._keys_CSPKD, self._values_CSPKD, self.capacity_tokens = keys_CSPKD, values_CSPKD, capacity

    def free(self) -> None:
        """Forgets everything and takes no memory until `reserve`."""
        self._keys_CSPKD, self._values_CSPKD = self._allocate(0)
        self.capacity_tokens = 0

    def write(self, layer: int, places_N: torch.Tensor, keys_KND: torch.Tensor, values_KND: torch.Tensor) -> None:
        """Stores the keys and values of a pass.

        Args:
            layer: Which layer.
            places_N: For each token, slot times capacity plus position.
            keys_KND: Keys.
            values_KND: Values.
        """
        self._keys_CSPKD[layer].flatten(0, 1).index_copy_(0, places_N, keys_KND.transpose(0, 1))
        self._values_CSPKD[layer].flatten(0, 1).index_copy_(0, places_N, values_KND.transpose(0, 1))

    def views(
        self, slot: int, begin: int, end: int, groups: int
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Returns keys and values of a slot from `begin` to `end`: per layer a view `[K, groups, end - begin, D]`."""
        return _views(self._keys_CSPKD, slot, begin, end, groups), _views(self._values_CSPKD, slot, begin, end, groups)

    def gathered(self, layer: int, slots_R: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of the first `end` positions of several slots: keys and values `[R, K, end, D]`."""
        keys = self._keys_CSPKD[layer, :, :end].index_select(0, slots_R).transpose(1, 2)
        values = self._values_CSPKD[layer, :, :end].index_select(0, slots_R).transpose(1, 2)
        return keys, values

    def _allocate(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self._shape
        rows = (shape.layers, self._slots, capacity, shape.heads)
        # Zeros, not garbage: a gathered row is read beyond its end, and a NaN there would survive the mask.
        keys = torch.zeros(*rows, shape.key_size, dtype=shape.dtype, device=self._device)
        return keys, torch.zeros(*rows, shape.value_size, dtype=shape.dtype, device=self._device)


def _views(stored_CSPKD: torch.Tensor, slot: int, begin: int, end: int, groups: int) -> tuple[torch.Tensor, ...]:
    stored_CKLD = stored_CSPKD[:, slot, begin:end].transpose(1, 2)
    return stored_CKLD.unsqueeze(2).expand(-1, -1, groups, -1, -1).unbind(0)
