"""Log-probabilities and entropies of whole sequences under the present weights, without gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rollwire.learner.batching import Budget
from rollwire.learner.model import Policy
from rollwire.learner.samples import ScoredSequence, pad

PerToken = NDArray[np.float32]
"""One value per position of a sequence."""


def score(
    policy: Policy, sequences: Sequence[ScoredSequence], temperature: float, budget: Budget
) -> list[tuple[PerToken, PerToken]]:
    """Returns log-probabilities and entropies of each sequence, float32[L] with zeros where its mask is false."""
    results = [
        (np.zeros(len(item.token_ids), np.float32), np.zeros(len(item.token_ids), np.float32)) for item in sequences
    ]
    wanted = [index for index, item in enumerate(sequences) if item.targets]
    with torch.no_grad():
        for rows in budget.divide([sequences[index].input_tokens for index in wanted]):
            budget.before_pass()
            chosen = [wanted[row] for row in rows]
            scores = policy.token_scores(pad([sequences[index] for index in chosen], policy.device), temperature)
            ends = np.cumsum([sequences[index].targets for index in chosen])[:-1]
            parts = zip(
                chosen,
                np.split(scores.logprobs.float().cpu().numpy(), ends),
                np.split(scores.entropies.float().cpu().numpy(), ends),
                strict=True,
            )
            for index, logprobs, entropies in parts:
                results[index][0][sequences[index].loss_mask] = logprobs
                results[index][1][sequences[index].loss_mask] = entropies
    return results
