"""Log-probabilities and entropies of whole sequences under the present weights, without gradient."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rollwire.learner.batching import Budget
from rollwire.learner.distributed import Ranks
from rollwire.learner.model import Policy
from rollwire.learner.samples import ScoredSequence, pad
from rollwire.learner.shares import passes

PerToken = NDArray[np.float32]
"""One value per position of a sequence."""


def score(
    policy: Policy, sequences: Sequence[ScoredSequence], temperature: float, budget: Budget
) -> list[tuple[PerToken, PerToken]]:
    """Returns log-probabilities and entropies of each sequence, float32[L] with zeros where its mask is false."""
    results = [
        (np.zeros(len(item.token_ids), np.float32), np.zeros(len(item.token_ids), np.float32)) for item in sequences
    ]
    own: list[int] = []
    wanted = [index for index, item in enumerate(sequences) if item.targets]
    with torch.no_grad():
        for part in passes([sequences[index].input_tokens for index in wanted], budget, policy.ranks):
            budget.before_pass()
            chosen = [wanted[row] for row in part.rows]
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
            own += chosen if part.counts else []
    policy.sharding.reshard()
    return _merged(policy.ranks, results, own)


def _merged(ranks: Ranks, results: list[tuple[PerToken, PerToken]], own: list[int]) -> list[tuple[PerToken, PerToken]]:
    """Returns the results of all ranks, of which `own` are this one's."""
    if ranks.data_size == 1:
        return results
    shares = ranks.gather_data([[index, *results[index]] for index in own])
    for index, logprobs, entropies in itertools.chain.from_iterable(shares):
        results[index] = (logprobs, entropies)
    return results
