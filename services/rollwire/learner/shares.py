"""Which rank computes which samples, so that all have about the same work and make as many passes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from rollwire.learner.batching import Budget
from rollwire.learner.distributed import Ranks

Division = list[list[list[int]]]
"""For each rank its micro-batches, each as indices into the lengths."""


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

    Of two divisions the one is taken whose heaviest rank has less work: samples dealt out by their tokens and each
    share divided into micro-batches, or the micro-batches that one rank would make, dealt out as wholes. The second
    pads less, the first is finer.

    Args:
        lengths: Tokens of each sample, >= 1; the same on all ranks.
        budget: What one pass may hold.
        ranks: This rank and their number.
        packed: Whether the samples of a pass take only their own tokens, no padding.
    """
    if not lengths:
        return []
    shares = ranks.data_size
    divided = [_samples_dealt(lengths, budget, shares, packed=packed)]
    if shares > 1:
        divided.append(_batches_dealt(lengths, budget, shares, packed=packed))
    shortest = min(range(len(lengths)), key=lengths.__getitem__)

    def heaviest(division: Division) -> int:
        count = max(map(len, division))
        idle = lengths[shortest] + budget.pass_cost_tokens
        return max(
            sum(budget.work(lengths, batch, packed=packed) for batch in share) + (count - len(share)) * idle
            for share in division
        )

    best = min(divided, key=heaviest)
    count = max(map(len, best))
    own = best[ranks.data_rank]
    rows = own + [[shortest]] * (count - len(own))
    return [Pass(chosen, number < len(own), number == count - 1) for number, chosen in enumerate(rows)]


def _samples_dealt(lengths: Sequence[int], budget: Budget, shares: int, *, packed: bool) -> Division:
    return [
        [[share[row] for row in rows] for rows in budget.divide([lengths[i] for i in share], packed=packed)]
        for share in balanced(lengths, shares)
    ]


def _batches_dealt(lengths: Sequence[int], budget: Budget, shares: int, *, packed: bool) -> Division:
    batches = budget.divide(lengths, packed=packed)
    work = [budget.work(lengths, batch, packed=packed) for batch in batches]
    return [[batches[i] for i in share] for share in evened(work, balanced(work, shares))]


def evened(weights: Sequence[int], shares: list[list[int]]) -> list[list[int]]:
    """Improves a division: takes from the heaviest share and gives to the lightest while that makes the former lighter.

    Each round moves one item, or exchanges two, such that the heavier of the two shares is then as light as possible.
    """
    shares = [list(share) for share in shares]
    loads = [sum(weights[item] for item in share) for share in shares]
    for _ in range(len(weights)):  # a bound on the time; it ends much sooner
        heavy, light = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[heavy] - loads[light]
        exchanges = [
            (abs(gap - 2 * (weights[given] - (weights[taken] if taken is not None else 0))), given, taken)
            for given in shares[heavy]
            for taken in (None, *shares[light])
        ]
        after, given, taken = min(exchanges, key=lambda exchange: exchange[0], default=(gap, 0, None))
        if after >= gap:
            break
        shares[heavy].remove(given)
        shares[light].append(given)
        if taken is not None:
            shares[light].remove(taken)
            shares[heavy].append(taken)
        moved = weights[given] - (weights[taken] if taken is not None else 0)
        loads[heavy] -= moved
        loads[light] += moved
    return [sorted(share) for share in shares]


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
