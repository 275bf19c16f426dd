"""Samples divided among ranks."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from rollwire.learner.batching import Budget
from rollwire.learner.distributed import Ranks
from rollwire.learner.seats import Seat
from rollwire.learner.shares import Pass, balanced, passes

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
