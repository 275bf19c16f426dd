from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.coordinator.admission import Admission
from rollwire.coordinator.arrivals import Arrival
from rollwire.coordinator.groups import GroupProgress, Tally
from rollwire.coordinator.planner import Planner
from rollwire.coordinator.pushed_groups import PushedGroups
from rollwire.coordinator.pushed_source import PushedSource, share_wanted
from rollwire.coordinator.tasks import Pulse
from rollwire.serving.config import load_config
from rollwire.v1 import trajectory_pb2

Maker = Callable[..., trajectory_pb2.Trajectory]


def test_one_pusher_is_asked_for_what_has_a_place_and_is_not_on_its_way() -> None:
    assert share_wanted(places=48, waiting=0, pushers=1) == 48
    assert share_wanted(places=48, waiting=47, pushers=1) == 1
    assert share_wanted(places=48, waiting=50, pushers=1) == 0
    assert share_wanted(places=48, waiting=0, pushers=0) == 48, "it is not connected yet"


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 50))
def test_pushers_together_are_asked_for_hardly_more_and_none_for_nothing_while_a_place_is_free(
    places: int, waiting: int, pushers: int
) -> None:
    free, share = max(0, places - waiting), share_wanted(places, waiting, pushers)
    assert free <= pushers * share < free + pushers
    assert (share > 0) == (free > 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 3), st.integers(1, 5), st.randoms(use_true_random=False))
def test_what_is_asked_for_in_a_round_is_trained_in_time_but_for_rounding_up(
    per_step: int, staleness: int, pushers: int, order: random.Random
) -> None:
    """I5; every round each pusher asks, then generates with the weights of then, while steps go on where they can."""
    admission = Admission(per_step, staleness, max_steps=12)
    places: list[int] = []
    rounds = late = 0
    while admission.step < 12:
        places += [admission.start() for _ in range(admission.free_places())]
        asked = share_wanted(len(places), 0, pushers) * pushers
        played_at = admission.step
        if order.random() < 0.5:  # a step that was ready goes on meanwhile
            _train(admission)
        for _ in range(asked):
            if places:
                admission.complete(places.pop(0), played_at)
        for index in admission.too_late():
            admission.drop(index)
            late += 1
        _train(admission)
        rounds += 1
        assert rounds < 100, "steps must not starve"
    assert late <= rounds * (pushers - 1)


def _train(admission: Admission) -> None:
    batch = admission.ready()
    if batch is not None:
        admission.take(batch)
        admission.advance()


class _Waits:
    """Submissions of which a test decides who looks next."""

    def __init__(self) -> None:
        self.changed = Pulse()
        self.looks: list[asyncio.Event] = []

    async def clear_out(self) -> None:
        """Nothing is too old."""

    async def wait(self, limit_s: float) -> None:
        self.looks.append(asyncio.Event())
        await self.looks[-1].wait()


class _Stored:
    def __init__(self, trajectories: list[trajectory_pb2.Trajectory]) -> None:
        self._trajectories = trajectories

    async def arrivals(self, tag: str, group_id: str) -> list[Arrival]:
        return [Arrival(item) for item in self._trajectories if item.group_id == group_id]


async def test_the_place_that_was_there_first_takes_the_group_whoever_looks_first(make_trajectory: Maker) -> None:
    """A later place may only be consumed later: there the same weights would be too old."""
    item = make_trajectory("theirs", tag="Pushed")
    groups, waits, ledger = PushedGroups(size=1, capacity=4), _Waits(), _Stored([item])
    source: Any = PushedSource(groups, waits, ledger, 60.0, lambda: None, lambda: None)  # type: ignore[arg-type]
    planner = Planner(
        load_config(
            None,
            ["environments=[{tag: Pushed, source: pushed}]", "validation.episodes=0", "batch.episodes_per_group=2"],
        )
    )
    playing: list[asyncio.Task[GroupProgress]] = []
    for index in (0, 1):
        playing.append(asyncio.create_task(source.play(planner.training_group(index), Tally(), None)))
        await asyncio.sleep(0)
    assert source.wanted("Pushed") == 2 and len(waits.looks) == 2
    groups.add(item, 0, 0.0)
    assert source.wanted("Pushed") == 1
    waits.looks[1].set()  # as where the other one's pause has just ended, and begun again
    async with asyncio.timeout(30):
        while len(waits.looks) < 3:
            await asyncio.sleep(0)
    waits.looks[0].set()
    progress = await asyncio.wait_for(playing[0], 30)
    assert progress.plan.index == 0 and progress.trajectories == [item]
    assert source.wanted("Pushed") == 1 and not playing[1].done()
    playing[1].cancel()
    await asyncio.gather(playing[1], return_exceptions=True)
    assert source.wanted("Pushed") == 0
