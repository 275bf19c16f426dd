"""Log-probabilities and entropies of whole sequences, or the critic's values, without gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollwire.learner.batching import Budget
from rollwire.learner.critic import Critic
from rollwire.learner.distributed import Ranks
from rollwire.learner.model import Policy
from rollwire.learner.samples import ScoredSequence, TokenBatch, lay_out
from rollwire.learner.sharding import Sharding
from rollwire.learner.shares import passes

PerToken = NDArray[np.float32]
"""One value per position of a sequence."""


class Network(Protocol):
    """A model that computes on this rank and the others together."""

    device: torch.device
    ranks: Ranks
    sharding: Sharding
    packs: bool


def score(
    policy: Policy, sequences: Sequence[ScoredSequence], temperature: float, budget: Budget
) -> list[tuple[PerToken, ...]]:
    """Returns log-probabilities and entropies of each sequence, float32[L] with zeros where its mask is false."""

    def compute(batch: TokenBatch) -> tuple[Tensor, Tensor]:
        scores = policy.token_scores(batch, temperature)
        return scores.logprobs, scores.entropies

    return _evaluate(policy, sequences, budget, compute, 2)


def predict(critic: Critic, sequences: Sequence[ScoredSequence], budget: Budget) -> list[tuple[PerToken, ...]]:
    """Returns the critic's values of each sequence, float32[L] with zeros where its mask is false."""
    return _evaluate(critic, sequences, budget, lambda batch: (critic.values(batch),), 1)


def _evaluate(
    network: Network,
    sequences: Sequence[ScoredSequence],
    budget: Budget,
    compute: Callable[[TokenBatch], tuple[Tensor, ...]],
    count: int,
) -> list[tuple[PerToken, ...]]:
    """Returns the `count` results that `compute` has for every target, spread over the positions of each sequence."""
    results = [tuple(np.zeros(len(item.token_ids), np.float32) for _ in range(count)) for item in sequences]
    own: list[int] = []
    wanted = [index for index, item in enumerate(sequences) if item.targets]
    with torch.no_grad():
        lengths = [sequences[index].input_tokens for index in wanted]
        for part in passes(lengths, budget, network.ranks, packed=network.packs):
            budget.before_pass()
            chosen = [wanted[row] for row in part.rows]
            batch = lay_out([sequences[index] for index in chosen], network.device, packed=network.packs)
            found = compute(batch)
            ends = np.cumsum([sequences[index].targets for index in chosen])[:-1]
            columns = [np.split(values.float().cpu().numpy(), ends) for values in found]
            for index, *values in zip(chosen, *columns, strict=True):
                for result, value in zip(results[index], values, strict=True):
                    result[sequences[index].loss_mask] = value
            own += chosen if part.counts else []
    network.sharding.reshard()
    return _merged(network.ranks, results, own)


def _merged(ranks: Ranks, results: list[tuple[PerToken, ...]], own: list[int]) -> list[tuple[PerToken, ...]]:
    """Returns the results of all ranks, of which `own` are this one's."""
    if ranks.data_size == 1:
        return results
    shares = ranks.gather_data([[index, *results[index]] for index in own])
    for index, *values in itertools.chain.from_iterable(shares):
        results[index] = tuple(values)
    return results
