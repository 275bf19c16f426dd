"""Samples divided among ranks."""

from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollwire.learner.batching import Budget
from rollwire.learner.distributed import Ranks
from rollwire.learner.seats import Seat
from rollwire.learner.shares import Pass, balanced, evened, passes

lengths = st.lists(st.integers(1, 500), min_size=1, max_size=60)


class _Ranks(Ranks):
    """Some rank of several, without the others."""

    def __init__(self, data_rank: int, data_size: int) -> None:
        super().__init__(Seat())
        self.data_rank, self.data_size = data_rank, data_size


def _all(items: list[int], shares: int, budget: Budget) -> list[list[Pass]]:
    return [passes(items, budget, _Ranks(rank, shares)) for rank in range(shares)]


@given(lengths, st.integers(1, 8))
def test_each_sample_counts_once_and_all_ranks_make_as_many_passes(items: list[int], shares: int) -> None:
    found = _all(items, shares, Budget(256, 16))
    assert len({len(rank) for rank in found}) == 1
    counted = [part.rows for rank in found for part in rank if part.counts]
    assert sorted(chain.from_iterable(counted)) == list(range(len(items)))
    for rank in found:
        assert [part.last for part in rank] == [False] * (len(rank) - 1) + [True]
        assert all(part.rows for part in rank)


@given(lengths, st.integers(1, 8))
def test_the_heaviest_share_is_within_grahams_bound(items: list[int], shares: int) -> None:
    loads = [sum(items[index] for index in share) for share in balanced(items, shares)]
    best = max(max(items), sum(items) / shares)  # no division can be better
    assert max(loads) <= best + max(items) * (1 - 1 / shares) + 1e-9
    assert sum(loads) == sum(items)


def test_a_rank_without_samples_computes_the_cheapest_one_with_weight_zero() -> None:
    (first, second, third) = _all([30, 20], 3, Budget(256, 16))
    assert first == [Pass([0], counts=True, last=True)]
    assert second == [Pass([1], counts=True, last=True)]
    assert third == [Pass([1], counts=False, last=True)]


def test_one_rank_computes_what_the_budget_says() -> None:
    items = [5, 3, 9, 1]
    budget = Budget(10, 0)
    assert [part.rows for part in passes(items, budget, Ranks())] == budget.divide(items)


def test_nothing_to_compute_takes_no_pass() -> None:
    assert _all([], 2, Budget(10, 0)) == [[], []]


@given(lengths, st.integers(1, 8))
def test_evening_loses_nothing_and_never_makes_the_heaviest_heavier(items: list[int], shares: int) -> None:
    before = balanced(items, shares)
    after = evened(items, before)
    assert sorted(chain.from_iterable(after)) == list(range(len(items)))
    heaviest = [max(sum(items[index] for index in share) for share in division) for division in (before, after)]
    assert heaviest[1] <= heaviest[0]


def test_evening_exchanges_where_moving_does_not_help() -> None:
    assert evened([5, 4, 3, 2], [[0, 1], [2, 3]]) == [[1, 2], [0, 3]]


def test_ranks_pad_hardly_more_than_one_rank_would() -> None:
    """Skewed lengths: the heaviest rank has its part of the work of one rank, up to four percent."""
    items = np.random.default_rng(0).lognormal(5.0, 0.8, 48).clip(16, 1024).astype(int).tolist()
    budget = Budget(2048, 128)
    alone = sum(budget.work(items, batch) for batch in budget.divide(items))
    loads = [sum(budget.work(items, part.rows) for part in rank) for rank in _all(items, 2, budget)]
    assert max(loads) <= 1.04 * alone / 2
