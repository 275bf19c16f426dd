"""Groups whose episodes are pushed: each training group takes the next complete one, in the order of their start.

The order matters: a group that is started later may be consumed later, and weights that are too old for its place by
then would have been in time for the one before.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

from rollwire.coordinator.groups import GroupPlan, GroupProgress, Tally
from rollwire.coordinator.ledger import Ledger
from rollwire.coordinator.pushed_groups import PushedGroup, PushedGroups
from rollwire.coordinator.submissions import LOOK_S, Submissions
from rollwire.v1 import trajectory_pb2, weights_pb2


def share_wanted(places: int, waiting: int, pushers: int) -> int:
    """Returns how many groups one pusher is asked for. Pure.

    Together pushers are asked for what can be trained in time, and hardly more: each would generate all of it
    otherwise. None is told 0 while a place is free, however little the others bring.

    Args:
        places: Training groups that wait for a pushed one: admission starts no more than can be consumed in time.
        waiting: Pushed groups that are on their way to a place, complete or not.
        pushers: Pushers that are connected.
    """
    return -(-max(0, places - waiting) // max(1, pushers))


class PushedSource:
    """Takes groups that were pushed; a `GroupSource`.

    Args:
        groups: The groups that wait.
        submissions: Takes them in.
        ledger: Has their trajectories.
        group_timeout_s: How long a training group waits for one.
        on_episode: Called for every episode that is taken.
        check: Raises `RunError` when no server is left that pushers could draw tokens from.
    """

    def __init__(
        self,
        groups: PushedGroups,
        submissions: Submissions,
        ledger: Ledger,
        group_timeout_s: float,
        on_episode: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        self._groups = groups
        self._submissions = submissions
        self._ledger = ledger
        self._group_timeout_s = group_timeout_s
        self._on_episode = on_episode
        self._check = check
        self._places: defaultdict[str, deque[GroupPlan]] = defaultdict(deque)

    def wanted(self, tag: str, pushers: int = 1) -> int:
        """Returns how many groups of a tag each of some pushers is asked for, see `share_wanted`."""
        return share_wanted(len(self._places[tag]), self._groups.waiting(tag), pushers)

    async def play(
        self, plan: GroupPlan, tally: Tally, required_version: weights_pb2.WeightVersion | None
    ) -> GroupProgress:
        """Waits for a complete group and takes it; gives up when none comes for too long.

        Without staleness only groups of the newest version wait, which is the required one.

        Raises:
            RunError: The run cannot go on.
        """
        places = self._places[plan.environment_tag]
        places.append(plan)
        try:
            group = await self._next_group(plan, places)
        finally:
            places.remove(plan)
            self._submissions.changed.fire()  # the next one's turn; and where a group was taken, there is room
        if group is None:
            progress = GroupProgress(plan, 1, tally)
            progress.cause = (
                f"no complete group was pushed as {plan.environment_tag} during timeouts.group_s="
                f"{self._group_timeout_s:g} s; start a pusher, or raise the limit"
            )
            return progress
        trajectories = [arrival.trajectory for arrival in await self._ledger.arrivals(group.tag, group.group_id)]
        progress = GroupProgress(replace(plan, environment_seed=group.seed), 1, tally)
        progress.adopt([_renamed(item, plan) for item in trajectories], group.oldest_step)
        for _ in trajectories:
            self._on_episode()
        return progress

    async def _next_group(self, plan: GroupPlan, places: deque[GroupPlan]) -> PushedGroup | None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._group_timeout_s
        while loop.time() < end:
            self._check()
            await self._submissions.clear_out()
            if places[0] is plan:
                group = self._groups.take(plan.environment_tag)
                if group is not None:
                    return group
            await self._submissions.wait(min(LOOK_S, max(0.0, end - loop.time())))
        return None


def _renamed(trajectory: trajectory_pb2.Trajectory, plan: GroupPlan) -> trajectory_pb2.Trajectory:
    """Gives a trajectory the group's own identifier: the pusher's may be that of another group of the run."""
    trajectory.group_id, trajectory.attempt = plan.group_id, 0
    return trajectory
