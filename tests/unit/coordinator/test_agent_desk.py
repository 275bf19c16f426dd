from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rollwire.coordinator.agent_desk import AgentDesk, Offer, Place
from rollwire.coordinator.groups import GroupPlan, GroupProgress, Tally
from rollwire.coordinator.planner import Planner
from rollwire.serving.config import RunConfig
from rollwire.v1 import rollout_pb2, trajectory_pb2

CONFIG = RunConfig.model_validate(
    {
        "environments": [{"tag": "A", "source": "agent"}, {"tag": "B", "source": "agent"}],
        "batch": {"episodes_per_group": 3},
        "validation": {"episodes": 0},
    }
)
PLANNER = Planner(CONFIG)


def offer(plan: GroupPlan, tally: Tally | None = None, attempts: int = 2) -> Offer:
    return Offer(GroupProgress(plan, attempts, tally or Tally()), None, 0.0)


def complete(place: Place, trajectory: trajectory_pb2.Trajectory) -> None:
    trajectory.attempt, trajectory.episode_index = place.attempt, place.episode_index
    place.offer.progress.add(rollout_pb2.RunGroupResponse(trajectory=trajectory))


def test_places_are_given_oldest_group_first_and_by_tag() -> None:
    desk = AgentDesk()
    first, other, second = (offer(PLANNER.training_group(index)) for index in (0, 1, 2))
    for item in (first, other, second):
        desk.add(item)
    places = [desk.take("A", "") for _ in range(6)]
    assert [(place.offer, place.episode_index) for place in places if place] == [
        *((first, index) for index in range(3)),
        *((second, index) for index in range(3)),
    ]
    assert desk.take("A", "") is None and desk.take("C", "") is None
    place = desk.take("B", "")
    assert place is not None and place.offer is other and other.task_name == "g00000001"


def test_a_name_fills_its_group_before_it_begins_another() -> None:
    desk = AgentDesk()
    offers = [offer(PLANNER.training_group(index)) for index in (0, 2, 4)]
    for item in offers:
        desk.add(item)
    taken = [desk.take("A", name) for name in ("x", "y", "x", "", "x", "x", "y", "")]
    indices = [offers.index(place.offer) if place else None for place in taken]
    assert indices == [0, 1, 0, 2, 0, None, 1, 2]
    again = desk.take("A", "g00000004")
    assert again is not None and again.offer is offers[2], "the name that the coordinator chose may be asked for"


def test_a_place_that_is_given_back_was_never_requested() -> None:
    desk, tally = AgentDesk(), Tally()
    desk.add(offer(PLANNER.training_group(0), tally))
    place = desk.take("A", "")
    assert place is not None and tally.requested == 1
    desk.give_back(place)
    assert tally.requested == 0
    again = desk.take("A", "")
    assert again is not None and (again.episode_index, again.attempt) == (0, 0)


def test_a_group_is_hopeless_when_one_episode_failed_too_often() -> None:
    desk = AgentDesk()
    item = offer(PLANNER.training_group(0))
    desk.add(item)
    for attempt in range(2):
        place = desk.take("A", "")
        assert place is not None and (place.episode_index, place.attempt) == (0, attempt)
        item.progress.fail_episode(0, trajectory_pb2.FAILURE_REASON_AGENT_FAILED, "no")
    assert item.hopeless and item.over and not item.progress.complete
    assert desk.take("A", "") is None


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3))
def test_whatever_agents_do_counts_add_up(seed: int, groups: int, attempts: int) -> None:
    """Requested = completed + failed + in flight at every moment, and groups share exactly one name."""
    order, desk, tally = random.Random(seed), AgentDesk(), Tally()
    offers = [offer(replace(PLANNER.training_group(2 * index), episodes=2), tally, attempts) for index in range(groups)]
    for item in offers:
        desk.add(item)
    open_places: list[Place] = []
    names: dict[str, set[str]] = defaultdict(set)
    for _ in range(60):
        match order.choice(["take", "take", "complete", "fail", "give back", "end"]):
            case "take":
                name = order.choice(["", "x", "y"])
                place = desk.take("A", name)
                if place is not None:
                    open_places.append(place)
                    names[place.offer.progress.plan.group_id].add(place.offer.task_name)
                    assert name in ("", place.offer.task_name)
            case "end" if order.random() < 0.1 and desk.offers:
                ended = order.choice(list(desk.offers.values()))
                desk.remove(ended)
                ended.progress.fail_pending(trajectory_pb2.FAILURE_REASON_CANCELLED, "over")
                open_places = [place for place in open_places if place.offer is not ended]
            case step if open_places and step != "end":
                place = open_places.pop(order.randrange(len(open_places)))
                if step == "complete":
                    complete(place, _trajectory(place))
                elif step == "fail":
                    place.offer.progress.fail_episode(
                        place.episode_index, trajectory_pb2.FAILURE_REASON_AGENT_LOST, "gone"
                    )
                else:
                    desk.give_back(place)
        assert tally.in_flight == len(open_places)
    assert all(len(found) == 1 for found in names.values())


def _trajectory(place: Place) -> trajectory_pb2.Trajectory:
    found = trajectory_pb2.Trajectory(trajectory_id="t", group_id=place.offer.progress.plan.group_id)
    sequence = found.sequences.add(token_ids=[1, 2], loss_mask=[False, True], logprobs=[0, -1])
    span = sequence.version_spans.add()
    span.version.lineage, span.range.begin, span.range.end = "line", 1, 2
    turn = found.turns.add()
    turn.response.begin, turn.response.end = 1, 2
    return found
