"""How far the learner's log-probabilities are from those that the engine recorded for the same tokens and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rollwire.learner.ratios import MAX_LOG_RATIO
from rollwire.learner.samples import Sample, at_targets

GAP_PREFIX: Final = "actor/logprob_gap_"
"""Begins the names of all metrics of the gap."""

_SMALL: Final = 0.01


def logprob_gap(logprobs_N: Tensor, samples: Sequence[Sample], comparable_tokens: int) -> dict[str, Tensor]:
    """Returns the gap over the samples of a micro-batch that are comparable; nothing where none is.

    With d the learner's log-probability minus the engine's, the mean of exp(d) - 1 - d estimates KL(engine || learner)
    without bias and with little variance (k3 of J. Schulman, "Approximating KL divergence", 2020).

    Args:
        logprobs_N: The learner's log-probabilities at the targets of `samples`.
        samples: Samples of one micro-batch.
        comparable_tokens: Targets in comparable samples of the whole optimizer step, over which micro-batches add up.
    """
    counted = np.repeat([sample.comparable for sample in samples], [sample.targets for sample in samples])
    if not counted.any():
        return {}
    recorded = torch.from_numpy(at_targets([sample.logprobs for sample in samples], samples)).to(logprobs_N.device)
    d = (logprobs_N.detach() - recorded)[torch.from_numpy(counted).to(logprobs_N.device)]
    # Where d is small the difference would be lost in rounding; the first terms of the series have it to 1e-5.
    k3 = torch.where(d.abs() < _SMALL, d.square() * (0.5 + d / 6), torch.expm1(d.clamp(max=MAX_LOG_RATIO)) - d)
    return {
        f"{GAP_PREFIX}mean": d.abs().sum() / comparable_tokens,
        f"{GAP_PREFIX}max": d.abs().max(),
        f"{GAP_PREFIX}k3": k3.sum() / comparable_tokens,
        f"{GAP_PREFIX}tokens": torch.tensor(float(len(d)), device=d.device),
    }
