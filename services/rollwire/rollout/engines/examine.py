"""Decides how a model is run: packed if that gives what the model itself gives, otherwise sequence by sequence.

transformers has hundreds of architectures and no flag that says which of them attend in the plain way, so a model is
tried: a few short sequences, packed and in chunks, against one ordinary forward pass of each.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from rollwire.rollout.engine import GenerationRequest, Sampling
from rollwire.rollout.engines.packed_attention import Shapes, UnsupportedAttentionError, attending
from rollwire.rollout.engines.runners import (
    PackedRunner,
    PlainRunner,
    Runner,
    keeps_chosen_logits,
    packed_logits,
    use_packed_attention,
)
from rollwire.rollout.engines.scheduler import Chunk, Generation
from rollwire.rollout.engines.slot_cache import CacheShape
from rollwire.serving.logs import get_logger
from rollwire.v1 import trajectory_pb2

_log = get_logger(__name__)
# Largest difference of log-probabilities that rounding explains.
_TOLERANCE: Final = {torch.float32: 1e-3}
_TOLERANCE_16_BIT: Final = 0.3
_TRIAL_LENGTHS: Final = (13, 7, 10)
_TRIAL_SPLITS: Final = ((0, 5, 12), (0, 6), (0, 9))
# Rotary embeddings whose angles depend on the longest position of the whole call.
_CALL_DEPENDENT_ROPE: Final = ("dynamic", "longrope")


def choose_runner(model: Any, slots: int, max_tokens: int) -> Runner:
    """Returns the fastest runner that agrees with the model's own forward pass.

    Args:
        model: A causal language model in evaluation mode.
        slots: Sequences that are decoded together.
        max_tokens: Longest sequence.
    """
    own_attention = model.config._attn_implementation
    with torch.inference_mode():
        trials = _trial_sequences(model, slots, max_tokens)
        expected = [_own_logprobs(model, tokens) for tokens in trials]
        try:
            shape = _cache_shape(model, max_tokens)
            _check(PackedRunner(model, shape, slots, max_tokens), trials, expected, model.dtype)
            # A new one: the cache of the trial is given back.
            return PackedRunner(model, shape, slots, max_tokens)
        except Exception as error:  # whatever the architecture does differently
            reason = _one_line(error)
        model.set_attn_implementation(own_attention)
        _log.warning("this architecture is decoded sequence by sequence, which is slower", reason=reason)
        try:
            _check(PlainRunner(model, keep_cache=True), trials, expected, model.dtype)
            return PlainRunner(model, keep_cache=True)
        except Exception as error:
            _log.warning("this architecture is decoded without a cache", reason=_one_line(error))
        return PlainRunner(model, keep_cache=False)


def _cache_shape(model: Any, max_tokens: int) -> CacheShape:
    """Makes the model use packed attention and returns what its layers store.

    Raises:
        UnsupportedAttentionError: The architecture shows that it would not work.
    """
    config = model.config.get_text_config()
    if _mentions(config.to_dict(), _CALL_DEPENDENT_ROPE):
        raise UnsupportedAttentionError("rotary angles depend on the longest sequence of a call")
    use_packed_attention(model)
    shapes = Shapes()
    with attending(shapes):
        one = torch.zeros(1, dtype=torch.long, device=model.device)
        packed_logits(model, [0], one, one, keeps_chosen_logits=keeps_chosen_logits(model))
    if sorted(shapes.layers) != list(range(config.num_hidden_layers)) or len(set(shapes.layers.values())) != 1:
        raise UnsupportedAttentionError("not every layer attends, or layers store different shapes")
    _check_windows(config, shapes.windows, max_tokens)
    heads, key_size, value_size = shapes.layers[0]
    return CacheShape(config.num_hidden_layers, heads, key_size, value_size, model.dtype)


def _check_windows(config: Any, passed: dict[int, int | None], max_tokens: int) -> None:
    """Checks that layers told the attention of their windows; the trial sequences are too short to show it."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedAttentionError(f"layers of type {sorted(unknown)}")
    configured = getattr(config, "sliding_window", None)
    if configured is None or configured >= max_tokens or getattr(config, "use_sliding_window", True) is False:
        return
    has_kinds = getattr(config, "layer_types", None) is not None
    for layer, kind in enumerate(kinds):
        expected = configured if kind == "sliding_attention" or not has_kinds else None
        if passed[layer] != expected:
            raise UnsupportedAttentionError(f"layer {layer} has a window of {configured} that it does not pass on")


def _trial_sequences(model: Any, slots: int, max_tokens: int) -> list[list[int]]:
    size = model.config.get_text_config().vocab_size
    return [
        [(31 * row + 17 * position + 5) % size for position in range(min(length, max_tokens - 1))]
        for row, length in enumerate(_TRIAL_LENGTHS[:slots])
    ]


def _own_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    out = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False)
    logits: torch.Tensor = out.logits[0].float()
    return logits.log_softmax(dim=-1)


def _check(runner: Runner, trials: list[list[int]], expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Feeds the trial sequences in chunks, several to a pass, and compares after every chunk.

    Raises:
        UnsupportedAttentionError: The runner differs from the model.
    """
    tolerance = _TOLERANCE.get(dtype, _TOLERANCE_16_BIT)
    for step in range(max(len(splits) for splits in _TRIAL_SPLITS)):
        chunks = [
            _trial_chunk(slot, tokens, splits, step)
            for slot, (tokens, splits) in enumerate(zip(trials, _TRIAL_SPLITS, strict=False))
            if step < len(splits) and splits[step] < len(tokens)
        ]
        found = runner.logits(chunks).float().log_softmax(dim=-1)
        wanted = torch.stack([expected[chunk.slot][chunk.end - 1] for chunk in chunks])
        gap = float((found - wanted).abs().max())
        if not gap <= tolerance:
            raise UnsupportedAttentionError(f"log-probabilities differ by {gap:.2g} from the model's own")


def _trial_chunk(slot: int, tokens: list[int], splits: tuple[int, ...], step: int) -> Chunk:
    end = splits[step + 1] if step + 1 < len(splits) else len(tokens)
    sampling = Sampling(1.0, 1.0, 0, 1, frozenset(), trajectory_pb2.LOGPROB_MODE_SAMPLED)
    request = GenerationRequest(tokens[:end], sampling, 0, len(tokens) + 1)
    return Chunk(Generation(request), slot, tokens[:end], splits[step], end)


def _mentions(settings: Any, words: tuple[str, ...]) -> bool:
    """Tells whether any rotary setting, nested ones included, has one of the words as its type."""
    if not isinstance(settings, dict):
        return False
    if settings.get("rope_type", settings.get("type")) in words:
        return True
    return any(_mentions(value, words) for value in settings.values())


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
