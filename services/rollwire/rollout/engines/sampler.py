"""Drawing tokens from logits, vectorised over the rows of a batch.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollwire.rollout.engine import Sampling
from rollwire.rollout.seeds import uniforms
from rollwire.v1 import trajectory_pb2

_MANTISSA_BITS = {torch.float64: 52, torch.float32: 23}


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to draw.

    Attributes:
        sampling: How.
        seed: Seed of the generation.
        index: Position of the token in the generation, from 0.
    """

    sampling: Sampling
    seed: int
    index: int


def draw_tokens(logits_NV: torch.Tensor, draws: Sequence[Draw], wide: torch.dtype) -> tuple[list[int], list[float]]:
    """Draws one token per row by inverting the cumulative distribution.

    Args:
        logits_NV: Raw logits.
        draws: One per row.
        wide: Type in which probabilities are summed; float64 unless the device lacks it.

    Returns:
        Token ids and their natural-log probabilities. A greedy row was drawn from a point mass: its log-probability
        under LOGPROB_MODE_SAMPLED is 0.
    """
    raw_NV = logits_NV.float()
    logp_NV = _distributions(raw_NV, draws, wide)
    tokens_N = _inverted(logp_NV, draws, wide)
    greedy = [row for row, draw in enumerate(draws) if draw.sampling.temperature == 0]
    if greedy:
        tokens_N[greedy] = raw_NV[greedy].argmax(dim=-1)
    chosen_N = logp_NV.gather(1, tokens_N[:, None])[:, 0]
    if greedy:
        chosen_N[greedy] = 0.0
    raw = [row for row, draw in enumerate(draws) if draw.sampling.logprob_mode == trajectory_pb2.LOGPROB_MODE_RAW]
    if raw:
        chosen_N[raw] = raw_NV[raw].log_softmax(dim=-1).gather(1, tokens_N[raw, None])[:, 0]
    return tokens_N.tolist(), chosen_N.tolist()


def _distributions(raw_NV: torch.Tensor, draws: Sequence[Draw], wide: torch.dtype) -> torch.Tensor:
    """Returns the log-probabilities of the distributions sampled from; greedy rows are left at temperature 1."""
    scaled_NV = raw_NV
    temperatures = [draw.sampling.temperature or 1.0 for draw in draws]
    if any(temperature != 1.0 for temperature in temperatures):
        # Differences to the largest logit, so that no temperature overflows.
        below_NV = raw_NV - raw_NV.amax(dim=-1, keepdim=True)
        scaled_NV = below_NV / torch.tensor(temperatures, device=raw_NV.device)[:, None]
    filtered = [row for row, draw in enumerate(draws) if draw.sampling.top_k > 0 or draw.sampling.top_p < 1]
    if filtered:
        scaled_NV = scaled_NV.clone()
        scaled_NV[filtered] = _filtered(scaled_NV[filtered], [draws[row].sampling for row in filtered], wide)
    return scaled_NV.log_softmax(dim=-1)


def _filtered(scaled_NV: torch.Tensor, samplings: Sequence[Sampling], wide: torch.dtype) -> torch.Tensor:
    """Sets logits outside top-k, then outside the nucleus, to -inf. Of equal logits the lower id counts as larger."""
    size = scaled_NV.shape[-1]
    device = scaled_NV.device
    sorted_NV, order_NV = scaled_NV.sort(dim=-1, descending=True, stable=True)
    kept = [min(sampling.top_k, size) if sampling.top_k > 0 else size for sampling in samplings]
    outside_NV = torch.arange(size, device=device)[None, :] >= torch.tensor(kept, device=device)[:, None]
    sorted_NV = sorted_NV.masked_fill(outside_NV, -torch.inf)
    probabilities_NV = sorted_NV.softmax(dim=-1, dtype=wide)
    before_NV = probabilities_NV.cumsum(dim=-1) - probabilities_NV
    top_p_N = torch.tensor([sampling.top_p for sampling in samplings], device=device, dtype=wide)
    # A full nucleus must not cut the tail when rounding makes the sum reach 1 early.
    past_nucleus_NV = (before_NV >= top_p_N[:, None]) & (top_p_N[:, None] < 1)
    past_nucleus_NV[:, 0] = False
    sorted_NV = sorted_NV.masked_fill(past_nucleus_NV, -torch.inf)
    return torch.empty_like(scaled_NV).scatter_(1, order_NV, sorted_NV)


def _inverted(logp_NV: torch.Tensor, draws: Sequence[Draw], wide: torch.dtype) -> torch.Tensor:
    """Returns, per row, the first token whose cumulative probability exceeds the row's uniform number."""
    seeds = np.array([draw.seed for draw in draws], dtype=np.uint64)
    indices = np.array([draw.index for draw in draws], dtype=np.uint64)
    uniform_N = torch.from_numpy(uniforms(seeds, indices, _MANTISSA_BITS[wide])).to(logp_NV.device, wide)
    cumulative_NV = logp_NV.to(wide).exp().cumsum(dim=-1)
    targets_N1 = uniform_N[:, None] * cumulative_NV[:, -1:]
    # A row of NaN has no such token; it gets the last one with a log-probability of NaN, which the caller refuses.
    return torch.searchsorted(cumulative_NV, targets_N1, right=True)[:, 0].clamp_(max=logp_NV.shape[-1] - 1)
