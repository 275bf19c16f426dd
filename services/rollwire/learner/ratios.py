"""Ratios of two policies' probabilities over tokens, segments or whole samples.

Tensors are flat over the N trained tokens of some samples, sample after sample, as `PaddedBatch.targets` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollwire.learner.samples import ScoredSequence

MAX_LOG_RATIO: Final = 20.0
"""Log-ratios are clamped to ± this before `exp`: overflow would turn the zero gradient of a clipped token into NaN."""


class RatioLevel(StrEnum):
    """Over what a ratio is taken; as in `rollwire.v1.RatioLevel`."""

    TOKEN = auto()
    SEQUENCE = auto()
    SEQUENCE_MEAN = auto()
    SEGMENT_MEAN = auto()


@dataclass(frozen=True)
class TokenSpans:
    """Which sample and which segment each of N tokens belongs to.

    A segment is a contiguous run of trained tokens: what the policy said in one turn.

    Attributes:
        sample: int64[N], counted from 0.
        segment: int64[N], counted from 0 over all samples.
        samples: Number of samples.
        segments: Number of segments.
    """

    sample: Tensor
    segment: Tensor
    samples: int
    segments: int


def token_spans(sequences: Sequence[ScoredSequence], device: torch.device) -> TokenSpans:
    """Returns the spans of the targets of sequences."""
    samples, segments, before = [], [], 0
    for index, sequence in enumerate(sequences):
        own = segment_ids(sequence.loss_mask)
        samples.append(np.full(len(own), index))
        segments.append(own + before)
        before += int(own[-1]) + 1 if len(own) else 0
    return TokenSpans(
        torch.from_numpy(np.concatenate(samples)).to(device),
        torch.from_numpy(np.concatenate(segments)).to(device),
        len(sequences),
        before,
    )


def segment_ids(loss_mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns the segment of each trained token of one sample, counted from 0."""
    begins = loss_mask & ~np.concatenate([[False], loss_mask[:-1]])
    ids: NDArray[np.int64] = np.cumsum(begins)[loss_mask] - 1
    return ids


def level_log_ratio(level: RatioLevel, log_ratio_N: Tensor, spans: TokenSpans) -> Tensor:
    """Returns for each token the log-ratio at a level, clamped, float[N].

    Its value is that of the token's span; its gradient is that of the token's own log-ratio, so that tokens of one span
    may have different advantages (GSPO-token: Zheng et al. 2025, arXiv 2507.18071). Where all tokens of a
    sample have the same advantage, the gradient is that of the ratio over the span.

    Args:
        level: Over what the ratio is taken.
        log_ratio_N: Log-probability now minus the old one, of each token.
        spans: Samples and segments of the tokens.
    """
    if level is RatioLevel.TOKEN:
        return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    by_segment = level is RatioLevel.SEGMENT_MEAN
    ids, count = (spans.segment, spans.segments) if by_segment else (spans.sample, spans.samples)
    detached = log_ratio_N.detach()
    total = torch.zeros(count, dtype=detached.dtype, device=detached.device).index_add_(0, ids, detached)
    if level is not RatioLevel.SEQUENCE:
        total = total / torch.bincount(ids, minlength=count).clamp(min=1)
    spread = total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[ids]
    return spread + (log_ratio_N - detached)
