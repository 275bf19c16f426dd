"""Who fetches from whom: no source is overrun, every reader is served, and the sources grow with the readers."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.coordinator.fan_out import FanOut


def test_the_first_readers_use_the_learner_and_the_others_those_that_are_done() -> None:
    plan = FanOut("learner", 2)
    assert [plan.take(), plan.take(), plan.take()] == ["learner", "learner", None]
    plan.give_back("learner")
    plan.add("a")
    assert [plan.take() for _ in range(4)] == ["a", "a", "learner", None]


def test_nobody_is_sent_to_a_relay_that_was_dropped() -> None:
    plan = FanOut("learner", 1)
    plan.add("a")
    assert plan.take() == "a"
    plan.drop("a")
    plan.drop("learner")
    plan.give_back("a")
    assert [plan.take(), plan.take()] == ["learner", None]


def test_rounds_grow_with_the_logarithm_of_the_readers() -> None:
    plan, waiting, rounds = FanOut("learner", 1), [f"r{number}" for number in range(255)], 0
    while waiting:
        running = []
        while waiting and (source := plan.take()) is not None:
            running.append((source, waiting.pop()))
        for source, reader in running:
            plan.give_back(source)
            plan.add(reader)
        rounds += 1
    assert rounds == math.log2(256)


@settings(deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(0, 40))
def test_every_reader_is_served_whatever_fails(data: st.DataObject, limit: int, readers: int) -> None:
    """`data` decides who is done next and how; there is always a reader that runs, until none waits."""
    plan = FanOut("learner", limit)
    waiting, running, served = [f"r{number}" for number in range(readers)], [], []
    while waiting or running:
        while waiting and (source := plan.take()) is not None:
            running.append((source, waiting.pop()))
        assert running, "readers wait and nobody fetches"
        for source in {source for source, _ in running}:
            assert sum(taken == source for taken, _ in running) <= limit
        source, reader = running.pop(data.draw(st.integers(0, len(running) - 1)))
        if source != "learner" and data.draw(st.booleans()):
            plan.drop(source)
        plan.give_back(source)
        if data.draw(st.booleans()):
            plan.add(reader)
        served.append(reader)
    assert len(served) == readers
