"""Which rank computes which samples, so that all have about the same number of tokens and make as many passes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from rollwire.learner.batching import Budget
from rollwire.learner.distributed import Ranks


@dataclass(frozen=True)
class Pass:
    """One forward pass of this rank.

    Attributes:
        rows: Samples, as indices into the lengths; at least one.
        counts: False if this rank has no samples left while another has: it computes some sample again with weight 0,
            because every pass is a common one, and its result is dropped.
        last: True for the last pass.
    """

    rows: list[int]
    counts: bool
    last: bool


def passes(lengths: Sequence[int], budget: Budget, ranks: Ranks, *, packed: bool = False) -> list[Pass]:
    """Divides samples among the ranks and this rank's samples into passes; every rank gets as many passes.

    Args:
        lengths: Tokens of each sample, >= 1; the same on all ranks.
        budget: What one pass may hold.
        ranks: This rank and their number.
        packed: Whether the samples of a pass take only their own tokens, no padding.
    """
    if not lengths:
        return []
    shares = balanced(lengths, ranks.data_size)
    divided = [
        [[share[row] for row in rows] for rows in budget.divide([lengths[i] for i in share], packed=packed)]
        for share in shares
    ]
    count = max(map(len, divided))
    own = divided[ranks.data_rank]
    shortest = min(range(len(lengths)), key=lengths.__getitem__)
    rows = own + [[shortest]] * (count - len(own))
    return [Pass(chosen, number < len(own), number == count - 1) for number, chosen in enumerate(rows)]


def balanced(lengths: Sequence[int], shares: int) -> list[list[int]]:
    """Divides samples into shares of nearly equal numbers of tokens: the longest first, each to the lightest share.

    Graham 1969 (longest processing time first): at most 4/3 - 1/(3·shares) times the best possible heaviest share.

    Returns:
        For each share its samples as ascending indices into `lengths`; shares are empty when there are fewer samples.
    """
    if shares == 1:
        return [list(range(len(lengths)))]
    loads = [(0, share) for share in range(shares)]
    found: list[list[int]] = [[] for _ in range(shares)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        load, share = heapq.heappop(loads)
        found[share].append(index)
        heapq.heappush(loads, (load + lengths[index], share))
    return [sorted(share) for share in found]
