from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.coordinator.admission import Admission


def start_all(admission: Admission) -> list[int]:
    return [admission.start() for _ in range(admission.free_places())]


def test_without_staleness_a_step_is_exactly_its_groups_in_order() -> None:
    admission = Admission(groups_per_step=3, max_staleness=0, max_steps=2)
    assert start_all(admission) == [0, 1, 2]
    admission.complete(2)
    admission.complete(0)
    assert admission.ready() is None
    admission.complete(1)
    assert admission.ready() == [0, 1, 2]
    admission.take([0, 1, 2])
    assert admission.free_places() == 0, "the learner trains: nothing starts before the new weights are out"
    admission.advance()
    assert start_all(admission) == [3, 4, 5]


def test_with_staleness_rollouts_go_on_while_the_learner_trains() -> None:
    admission = Admission(groups_per_step=2, max_staleness=1, max_steps=10)
    assert start_all(admission) == [0, 1, 2, 3]
    for index in (2, 0):
        admission.complete(index)
    assert admission.ready() == [0, 2], "in the order of completion among equally old groups"
    admission.take([0, 2])
    assert admission.running == 2
    assert admission.free_places() == 0
    admission.advance()
    assert start_all(admission) == [4, 5]


def test_a_straggler_is_waited_for_before_it_becomes_too_old() -> None:
    admission = Admission(groups_per_step=1, max_staleness=2, max_steps=10)
    assert start_all(admission) == [0, 1, 2]
    admission.complete(0)
    assert admission.ready() == [0]
    admission.take([0])
    admission.advance()
    (fourth,) = start_all(admission)
    admission.complete(fourth)
    # 1 and 2 must be consumed at steps 1 and 2: nothing newer may go before them.
    assert admission.ready() is None
    admission.complete(1)
    assert admission.ready() == [1]


def test_a_dropped_group_is_replaced_by_the_next_index() -> None:
    admission = Admission(groups_per_step=2, max_staleness=0, max_steps=1)
    start_all(admission)
    admission.drop(0)
    assert start_all(admission) == [2]
    admission.complete(1)
    admission.complete(2)
    assert admission.ready() == [1, 2]


def test_nothing_is_started_beyond_the_last_step() -> None:
    admission = Admission(groups_per_step=2, max_staleness=5, max_steps=2)
    assert len(start_all(admission)) == 4


def test_starting_without_a_place_is_a_bug() -> None:
    admission = Admission(groups_per_step=1, max_staleness=0, max_steps=1)
    admission.start()
    with pytest.raises(AssertionError):
        admission.start()


@given(
    per_step=st.integers(1, 4),
    staleness=st.integers(0, 4),
    chance_of_a_drop=st.sampled_from([0.0, 0.2]),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_any_order_of_events_ends_the_run_within_the_bounds(
    per_step: int, staleness: int, chance_of_a_drop: float, order: random.Random
) -> None:
    """Groups complete or fail in any order, also while a batch is in work; I5 and the admission bound always hold."""
    max_steps = 8
    admission = Admission(per_step, staleness, max_steps)
    started_at: dict[int, int] = {}
    running: list[int] = []
    consumed: list[int] = []
    taken: list[int] = []
    dropped = 0
    while admission.step < max_steps:
        for index in start_all(admission):
            assert index not in started_at
            started_at[index] = admission.step
            running.append(index)
        assert len(started_at) - dropped == min(staleness + admission.step + 1, max_steps) * per_step
        batch = None if taken else admission.ready()
        choices = ["finish"] * bool(running) + ["take"] * (batch is not None) + ["advance"] * bool(taken)
        match order.choice(choices):  # never empty: the run cannot get stuck
            case "finish":
                index = running.pop(order.randrange(len(running)))
                if order.random() < chance_of_a_drop:
                    admission.drop(index)
                    dropped += 1
                else:
                    admission.complete(index)
            case "take":
                assert batch is not None and batch == sorted(batch) and len(batch) == per_step
                assert all(0 <= admission.step - started_at[index] <= staleness for index in batch), "I5"
                admission.take(batch)
                taken = batch
            case "advance":
                admission.advance()
                consumed.extend(taken)
                taken = []
    assert len(consumed) == len(set(consumed)) == max_steps * per_step


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 2), st.integers(1, 6))
def test_a_run_that_is_killed_at_any_time_goes_on_with_what_was_complete(
    seed: int, per_step: int, staleness: int, max_steps: int
) -> None:
    """I2, I5: groups that were running are started again under their index; complete ones are consumed in time."""
    order = random.Random(seed)
    admission = Admission(per_step, staleness, max_steps)
    started_at: dict[int, int] = {}
    ended: set[int] = set()
    waiting: set[int] = set()
    consumed: list[int] = []
    running: list[int] = []
    kills = 0
    while admission.step < max_steps:
        for index in start_all(admission):
            assert index not in ended
            started_at[index] = admission.step
            running.append(index)
        batch = admission.ready()
        choices = ["finish"] * bool(running) + ["train"] * (batch is not None) + ["kill"] * (kills < 20)
        match order.choice(choices):
            case "finish":
                index = running.pop(order.randrange(len(running)))
                ended.add(index)
                if order.random() < 0.2:
                    admission.drop(index)
                else:
                    admission.complete(index)
                    waiting.add(index)
            case "train":
                assert batch is not None and all(admission.step - started_at[index] <= staleness for index in batch)
                admission.take(batch)
                admission.advance()
                consumed.extend(batch)
                waiting -= set(batch)
            case "kill":
                kills += 1
                step, admission, running = admission.step, Admission(per_step, staleness, max_steps), []
                admission.restore(step, ended, {index: started_at[index] for index in sorted(waiting)})
    assert len(consumed) == len(set(consumed)) == max_steps * per_step
    assert waiting == set() or staleness, "without staleness nothing complete is left over"


def test_groups_that_were_played_too_early_are_too_late_where_others_would_suffer() -> None:
    admission = Admission(groups_per_step=1, max_staleness=1, max_steps=10)
    start_all(admission)
    admission.take([_complete(admission, 0)])
    admission.advance()
    start_all(admission)
    # 1 was started at step 0 and is due now; 2 has weights of step 0 as well, and there is room for one of them.
    admission.complete(2, played_at=0)
    assert admission.too_late() == [2]
    admission.drop(2)
    admission.complete(1)
    assert admission.too_late() == [] and admission.ready() == [1]


def _complete(admission: Admission, index: int) -> int:
    admission.complete(index)
    return index


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 3), st.integers(1, 8))
def test_pushed_groups_of_any_age_neither_stop_a_run_nor_make_anything_too_old(
    seed: int, per_step: int, staleness: int, max_steps: int
) -> None:
    """I5; groups that servers play are never dropped for those that are pushed."""
    order = random.Random(seed)
    admission = Admission(per_step, staleness, max_steps)
    played_at: dict[int, int] = {}
    pushed: set[int] = set()
    running: list[int] = []
    consumed: list[int] = []
    taken: list[int] = []
    drops = 0
    while admission.step < max_steps:
        for index in start_all(admission):
            played_at[index] = admission.step
            running.append(index)
        if not taken:
            for index in admission.too_late():
                assert index in pushed
                admission.drop(index)
                drops += 1
            for index in start_all(admission):
                played_at[index] = admission.step
                running.append(index)
        batch = None if taken else admission.ready()
        choices = ["finish"] * bool(running) + ["take"] * (batch is not None) + ["advance"] * bool(taken)
        match order.choice(choices):  # never empty: the run cannot get stuck
            case "finish":
                index = running.pop(order.randrange(len(running)))
                # Pushers come with old weights for a while; for ever they would keep the run from going on.
                if order.random() < 0.6 and drops < 50:
                    played_at[index] = max(0, admission.step - order.randint(0, staleness))
                    pushed.add(index)
                    admission.complete(index, played_at[index])
                else:
                    admission.complete(index)
            case "take":
                assert batch is not None
                assert all(0 <= admission.step - played_at[index] <= staleness for index in batch), "I5"
                admission.take(batch)
                taken = batch
            case "advance":
                admission.advance()
                consumed.extend(taken)
                taken = []
    assert len(consumed) == len(set(consumed)) == max_steps * per_step
