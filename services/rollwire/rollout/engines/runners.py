"""Two ways to compute the passes that the scheduler plans: packed and fast, or sequence by sequence for any model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

from rollwire.rollout.engines.packed_attention import NAME, Pass, Row, attending
from rollwire.rollout.engines.scheduler import Chunk
from rollwire.rollout.engines.slot_cache import CacheShape, SlotCache

_CPU: Final = "cpu"


class Runner(Protocol):
    """Computes passes; called by one thread."""

    def logits(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Puts chunks into the cache and returns the logits `[n, V]` after each of the n chunks that are last."""

    def forget(self) -> None:
        """Forgets all that is cached; the weights have changed."""

    def free(self) -> None:
        """Forgets all that is cached, and gives its memory back."""


class PackedRunner:
    """Packs all chunks of a pass into one model call.

    Args:
        model: A model that `examine` found fit for it.
        shape: What its layers store.
        slots: Rows of the cache.
        max_tokens: Longest sequence.
        gather_decoding: See `Pass`; None means on every device but the CPU.
    """

    def __init__(
        self, model: Any, shape: CacheShape, slots: int, max_tokens: int, *, gather_decoding: bool | None = None
    ) -> None:
        self._model = model
        self._device: torch.device = model.device
        self._dtype = shape.dtype
        self._gather_decoding = self._device.type != _CPU if gather_decoding is None else gather_decoding
        self._cache = SlotCache(shape, slots, max_tokens, self._device)
        self._keeps_chosen_logits = keeps_chosen_logits(model)

    def logits(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """See `Runner`."""
        # Rows of one token first: those may be decoded together.
        order = sorted(range(len(chunks)), key=lambda index: chunks[index].end - chunks[index].begin > 1)
        rows = [Row(chunks[index].slot, chunks[index].begin, chunks[index].end) for index in order]
        single = sum(row.end - row.begin == 1 for row in rows)
        self._cache.reserve(max(row.end for row in rows))
        together = single if self._gather_decoding and single > 1 else 0
        current = Pass(self._cache, rows, together, self._dtype, self._device)
        tokens = [token for index in order for token in chunks[index].tokens[chunks[index].begin : chunks[index].end]]
        last_places, place = {}, -1
        for index, row in zip(order, rows, strict=True):
            place += row.end - row.begin
            last_places[index] = place
        wanted = torch.tensor(
            [last_places[index] for index, chunk in enumerate(chunks) if chunk.is_last],
            device=self._device,
            dtype=torch.long,
        )
        with attending(current):
            return packed_logits(
                self._model, tokens, current.positions_N, wanted, keeps_chosen_logits=self._keeps_chosen_logits
            )

    def forget(self) -> None:
        """See `Runner`; slots are overwritten before they are read, so there is nothing to do."""

    def free(self) -> None:
        """See `Runner`."""
        self._cache.free()


class PlainRunner:
    """Computes sequence by sequence with transformers' own attention: right for every causal model, and slower.

    Args:
        model: The model.
        keep_cache: Keep transformers' own cache per sequence; otherwise every token computes its sequence anew.
    """

    def __init__(self, model: Any, *, keep_cache: bool) -> None:
        self._model = model
        self._keep_cache = keep_cache
        self._caches: dict[int, tuple[list[int], Any]] = {}

    def logits(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """See `Runner`."""
        found = [self._one(chunk) for chunk in chunks]
        kept = [logits for chunk, logits in zip(chunks, found, strict=True) if chunk.is_last]
        return torch.stack(kept) if kept else torch.empty(0, 0, device=self._model.device)

    def forget(self) -> None:
        """See `Runner`."""
        self._caches.clear()

    def free(self) -> None:
        """See `Runner`."""
        self.forget()

    def _one(self, chunk: Chunk) -> torch.Tensor:
        """Returns the logits `[V]` after a chunk."""
        if not self._keep_cache:
            out = self._model(input_ids=self._row(chunk.tokens[: chunk.end]), use_cache=False)
            return _last(out)
        tokens, cache = self._caches.pop(chunk.slot, ([], None))
        # The cache of transformers cannot be cut back in general: it serves only an exact extension.
        if tokens != chunk.tokens[: len(tokens)] or len(tokens) >= chunk.end:
            tokens, cache = [], None
        out = self._model(
            input_ids=self._row(chunk.tokens[len(tokens) : chunk.end]), past_key_values=cache, use_cache=True
        )
        self._caches[chunk.slot] = (chunk.tokens[: chunk.end], out.past_key_values)
        return _last(out)

    def _row(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor([tokens], device=self._model.device)


def _last(out: Any) -> torch.Tensor:
    logits: torch.Tensor = out.logits[0, -1]
    return logits


def keeps_chosen_logits(model: Any) -> bool:
    """Tells whether the model can compute the logits of chosen positions alone."""
    return "logits_to_keep" in inspect.signature(type(model).forward).parameters


def packed_logits(
    model: Any,
    tokens: list[int],
    positions_N: torch.Tensor,
    wanted_M: torch.Tensor,
    *,
    keeps_chosen_logits: bool,
) -> torch.Tensor:
    """Calls the model on packed tokens and returns the logits `[M, V]` at the wanted places of the packing."""
    arguments = {"logits_to_keep": wanted_M} if keeps_chosen_logits and len(wanted_M) else {}
    out = model(
        input_ids=torch.tensor([tokens], device=positions_N.device),
        position_ids=positions_N[None],
        use_cache=False,
        **arguments,
    )
    logits: torch.Tensor = out.logits[0]
    return logits if arguments else logits[wanted_M]


def use_packed_attention(model: Any) -> None:
    """Makes the model call `packed_attention` in every layer."""
    model.set_attn_implementation(NAME)
