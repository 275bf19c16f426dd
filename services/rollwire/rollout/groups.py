"""Groups: how many episodes run at once, and the stream of their results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from rollwire.rollout.episode import EpisodeRunner
from rollwire.rollout.requests import GroupPlan
from rollwire.rpc.errors import Reason, exhausted
from rollwire.v1 import rollout_pb2

# Part of the call's deadline that is kept back, so that episodes which run out of time are still reported.
_REPORT_SHARE: Final = 0.1
_REPORT_S: Final = 1.0


class EpisodeSlots:
    """Counts the episodes of groups and the sessions of agents, which take the same places.

    Args:
        capacity: Episodes that may run at once.

    Attributes:
        capacity: As given.
        taken: Places taken now.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.taken = 0

    def take(self, asked: int) -> None:
        """Takes places. Raises `RollwireError`, RESOURCE_EXHAUSTED / `EPISODES_EXHAUSTED`."""
        if self.taken + asked > self.capacity:
            raise exhausted(
                Reason.EPISODES_EXHAUSTED,
                f"{self.taken} episodes are running and {asked} more were asked for; allowed: {self.capacity} "
                "(rollout.max_episodes); ask again when some have ended",
                1.0,
                running=str(self.taken),
                capacity=str(self.capacity),
            )
        self.taken += asked

    def give_back(self, count: int) -> None:
        """Frees places."""
        self.taken -= count


class GroupRunner:
    """Plays groups.

    Args:
        runner: Plays one episode.
        slots: Places for episodes.
    """

    def __init__(self, runner: EpisodeRunner, slots: EpisodeSlots) -> None:
        self._runner = runner
        self._slots = slots

    async def play(self, plan: GroupPlan, remaining_s: float) -> AsyncGenerator[rollout_pb2.RunGroupResponse, None]:
        """Yields exactly one result per planned episode, as they end; closing early cancels those still played.

        Args:
            plan: The group.
            remaining_s: Time until the call's deadline.

        Raises:
            RollwireError: RESOURCE_EXHAUSTED / `EPISODES_EXHAUSTED`.
        """
        asked = len(plan.indices)
        timeout_s = remaining_s - min(_REPORT_S, remaining_s * _REPORT_SHARE)
        if plan.episode_timeout_s is not None:
            timeout_s = min(timeout_s, plan.episode_timeout_s)
        self._slots.take(asked)
        tasks = [asyncio.create_task(self._runner.play(plan, index, timeout_s)) for index in plan.indices]
        try:
            for result in asyncio.as_completed(tasks):
                yield await result
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # also for a call that is cancelled twice
                self._slots.give_back(asked)
