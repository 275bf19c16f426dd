"""Attention for sequences packed into one row without padding, each with its own past in the slot cache.

Everything else in a transformer works token by token, so a pass over sequences of any lengths is one model call on
their concatenated tokens; only attention must keep them apart. It is installed as an attention implementation of
transformers.

Legend: H query heads, K key-value heads, G = H / K, D head size, N tokens of the pass, T tokens of one chunk, L length
of one sequence up to the end of its chunk, R sequences decoded together.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rollwire.rollout.engines.slot_cache import SlotCache

NAME: Final = "rollwire_packed"
# Arguments that change the result and that this attention does not compute; the plain runner serves such models.
_UNSUPPORTED: Final = ("softcap", "s_aux", "position_bias", "head_mask")


class UnsupportedAttentionError(Exception):
    """The model needs an attention that this module does not compute."""


class Attention(Protocol):
    """Computes the attention of one layer for the pass in progress."""

    def attend(
        self,
        layer: int,
        query_1HND: torch.Tensor,
        key_1KND: torch.Tensor,
        value_1KND: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Returns the attended values, `[1, N, H, D]`.

        Args:
            layer: Which layer.
            query_1HND: Queries.
            key_1KND: Keys of the tokens of the pass.
            value_1KND: Their values.
            scale: Factor of the scores; None for 1 / sqrt(D).
            window: Number of latest positions seen, the token itself included; None for all.
        """


class Shapes:
    """Stands in for a pass while a model is examined: attends within the pass and records what layers would store."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int, int]] = {}
        """Layer to heads, key size and value size."""
        self.windows: dict[int, int | None] = {}
        """Layer to window."""

    def attend(
        self,
        layer: int,
        query_1HND: torch.Tensor,
        key_1KND: torch.Tensor,
        value_1KND: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """See `Attention`."""
        if layer in self.layers:
            raise UnsupportedAttentionError(f"layer {layer} attends twice in a pass")
        self.layers[layer] = (key_1KND.shape[1], key_1KND.shape[-1], value_1KND.shape[-1])
        self.windows[layer] = window
        groups = query_1HND.shape[1] // key_1KND.shape[1]
        keys, values = key_1KND.repeat_interleave(groups, dim=1), value_1KND.repeat_interleave(groups, dim=1)
        return scaled_dot_product_attention(query_1HND, keys, values, is_causal=True, scale=scale).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Row:
    """A chunk of a sequence: positions `begin` to `end` of a slot."""

    slot: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Past:
    """What one row attends to in layers of one window: views per layer `[K, G, L, D]`, and the mask `[T, L]`."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    mask: torch.Tensor | None
    is_causal: bool


class Pass:
    """The rows of one pass.

    Args:
        cache: Keys and values; has room for every row.
        rows: In packing order; those decoded together come first.
        decoded_together: Number of leading rows of one token whose pasts are copied side by side, so that one kernel
            serves them all. Pays where starting a kernel costs more than the copy; on a CPU a loop over views is as
            fast.
        dtype: Element type of the model.
        device: Where the model is.
    """

    def __init__(
        self, cache: SlotCache, rows: Sequence[Row], decoded_together: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._together = decoded_together
        self._dtype = dtype
        self._device = device
        capacity = cache.capacity_tokens
        positions = [position for row in rows for position in range(row.begin, row.end)]
        places = [row.slot * capacity + position for row in rows for position in range(row.begin, row.end)]
        self.positions_N = torch.tensor(positions, device=device)
        self._places_N = torch.tensor(places, device=device)
        alone = [row.end - row.begin for row in rows[decoded_together:]]
        self._splits = [decoded_together, *alone] if decoded_together else alone
        self._pasts: dict[int | None, list[_Past]] = {}
        self._together_masks: dict[int | None, torch.Tensor] = {}
        self._together_slots_R = torch.tensor([row.slot for row in rows[:decoded_together]], device=device)

    def attend(
        self,
        layer: int,
        query_1HND: torch.Tensor,
        key_1KND: torch.Tensor,
        value_1KND: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """See `Attention`."""
        heads = key_1KND.shape[1]
        groups = query_1HND.shape[1] // heads
        self._cache.write(layer, self._places_N, key_1KND[0], value_1KND[0])
        if window not in self._pasts:
            self._pasts[window] = [self._past(row, window, groups) for row in self._rows[self._together :]]
        query_KGND = query_1HND[0].view(heads, groups, *query_1HND.shape[2:])
        parts_KGTD = list(torch.split(query_KGND, self._splits, dim=2))
        outputs = [self._attend_together(layer, parts_KGTD.pop(0), scale, window)] if self._together else []
        outputs += [
            scaled_dot_product_attention(
                part,
                past.keys[layer],
                past.values[layer],
                attn_mask=past.mask,
                is_causal=past.is_causal,
                scale=scale,
            )
            for part, past in zip(parts_KGTD, self._pasts[window], strict=True)
        ]
        return torch.cat(outputs, dim=2).flatten(0, 1).transpose(0, 1)[None]

    def _past(self, row: Row, window: int | None, groups: int) -> _Past:
        first = 0 if window is None else max(0, row.begin - window + 1)
        keys, values = self._cache.views(row.slot, first, row.end, groups)
        if row.end - row.begin == 1:
            return _Past(keys, values, None, is_causal=False)
        if row.begin == 0 and (window is None or row.end <= window):
            return _Past(keys, values, None, is_causal=True)
        asked_T1 = torch.arange(row.begin, row.end, device=self._device)[:, None]
        stored_L = torch.arange(first, row.end, device=self._device)
        return _Past(keys, values, self._additive(_visible(asked_T1, stored_L, window)), is_causal=False)

    def _attend_together(
        self, layer: int, query_KGRD: torch.Tensor, scale: float | None, window: int | None
    ) -> torch.Tensor:
        ends = [row.end for row in self._rows[: self._together]]
        longest = max(ends)
        if window not in self._together_masks:
            last_R1 = torch.tensor(ends, device=self._device)[:, None] - 1
            seen_RL = _visible(last_R1, torch.arange(longest, device=self._device), window)
            self._together_masks[window] = self._additive(seen_RL)[:, None, None, :]
        keys_RKLD, values_RKLD = self._cache.gathered(layer, self._together_slots_R, longest)
        # The G query heads of a key-value head take the place of query positions: no key is copied per query head.
        out_RKGD = scaled_dot_product_attention(
            query_KGRD.permute(2, 0, 1, 3), keys_RKLD, values_RKLD, attn_mask=self._together_masks[window], scale=scale
        )
        return out_RKGD.permute(1, 2, 0, 3)

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        return torch.zeros(visible.shape, dtype=self._dtype, device=self._device).masked_fill_(~visible, -torch.inf)


def _visible(asked: torch.Tensor, stored: torch.Tensor, window: int | None) -> torch.Tensor:
    """Tells which stored positions an asked position attends to."""
    seen = stored <= asked
    return seen if window is None else seen & (stored > asked - window)


_in_progress = threading.local()


@contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """Makes `attention` serve the model calls of this thread."""
    _in_progress.attention = attention
    try:
        yield
    finally:
        del _in_progress.attention


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The signature that transformers calls; masks and dropout have no meaning in a pass."""
    for name in _UNSUPPORTED:
        if arguments.get(name) is not None:
            raise UnsupportedAttentionError(f"attention with {name}")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or query.shape[1] % key.shape[1] != 0:
        raise UnsupportedAttentionError(f"{type(module).__name__} has no layer index or no grouped heads")
    attention: Attention = _in_progress.attention
    return attention.attend(layer, query, key, value, scaling, sliding_window), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention_function)
