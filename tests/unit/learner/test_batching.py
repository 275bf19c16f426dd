"""Division into optimizer steps and micro-batches."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.learner.batching import Budget, micro_batches, optimizer_step_split, packed_batches, padded_tokens

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=60)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 2**64 - 1))
def test_every_sample_is_in_exactly_one_optimizer_step(samples: int, steps: int, seed: int) -> None:
    split = optimizer_step_split(samples, steps, seed)

    assert sorted(index for step in split for index in step) == list(range(samples))
    assert len(split) == min(steps, samples)
    sizes = [len(step) for step in split]
    assert max(sizes) - min(sizes) <= 1
    assert split == optimizer_step_split(samples, steps, seed)


def test_the_seed_decides_the_split() -> None:
    assert optimizer_step_split(64, 2, seed=1) != optimizer_step_split(64, 2, seed=2)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 1000), st.integers(0, 300))
def test_micro_batches_cover_every_sample_once_within_the_budget(lengths: list[int], budget: int, cost: int) -> None:
    batches = micro_batches(lengths, budget, cost)

    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= budget
    longest = [max(lengths[index] for index in batch) for batch in batches]
    assert longest == sorted(longest, reverse=True)
    assert batches == micro_batches(lengths, budget, cost)


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(1, 40), st.integers(0, 20))
def test_no_other_division_of_the_sorted_samples_is_cheaper(lengths: list[int], budget: int, cost: int) -> None:
    def work(batches: list[list[int]]) -> int:
        return padded_tokens(lengths, batches) + cost * len(batches)

    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    cheapest = None
    for cuts in range(2 ** (len(order) - 1)):
        places = [0, *(place for place in range(1, len(order)) if cuts >> (place - 1) & 1), len(order)]
        division = [order[begin:end] for begin, end in pairwise(places)]
        if all(len(batch) == 1 or padded_tokens(lengths, [batch]) <= budget for batch in division):
            cheapest = min(cheapest, work(division)) if cheapest is not None else work(division)

    assert work(micro_batches(lengths, budget, cost)) == cheapest


def test_a_free_pass_leaves_no_padding() -> None:
    lengths = [3, 7, 3, 7, 5]

    batches = micro_batches(lengths, max_tokens=100, pass_cost_tokens=0)

    assert padded_tokens(lengths, batches) == sum(lengths)


def test_a_dear_pass_joins_samples_of_different_length() -> None:
    assert len(micro_batches([3, 7, 3, 7, 5], max_tokens=100, pass_cost_tokens=50)) == 1


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 1000))
def test_packed_micro_batches_cover_every_sample_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = packed_batches(lengths, budget)

    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in batch) for batch in batches]
    assert all(load <= budget or len(batch) == 1 for batch, load in zip(batches, loads, strict=True))
    # No two of them fit into one, or a sample would have gone to the other.
    assert all(left + right > budget for number, left in enumerate(loads) for right in loads[:number])


def test_packed_micro_batches_take_the_smallest_room_that_is_enough() -> None:
    assert packed_batches([6, 2, 9, 4, 1], 10) == [[2, 4], [0, 3], [1]]
    assert Budget(10, 0).divide([6, 2, 9, 4, 1], packed=True) == [[2, 4], [0, 3], [1]]
