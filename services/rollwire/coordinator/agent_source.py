"""Groups whose episodes agents play: offered until all are closed, given up when nobody comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollwire.coordinator.agent_desk import AgentDesk, Offer
from rollwire.coordinator.agent_sessions import AgentSessions
from rollwire.coordinator.budgets import Budgets
from rollwire.coordinator.groups import GroupPlan, GroupProgress, Tally
from rollwire.coordinator.intake import oldest_of_stored
from rollwire.coordinator.ledger import Ledger
from rollwire.v1 import trajectory_pb2, weights_pb2


class AgentSource:
    """Has groups played by agents; a `GroupSource`.

    Args:
        desk: Where groups are offered.
        sessions: The sessions that play them.
        ledger: What arrived in an earlier incarnation of the coordinator.
        newest: Returns the version that the learner has reached.
        max_staleness: Most versions that a trained token may lag.
        group_timeout_s: How long a group may wait for an agent.
        budgets: Bounds of retries.
    """

    def __init__(
        self,
        desk: AgentDesk,
        sessions: AgentSessions,
        ledger: Ledger,
        newest: Callable[[], weights_pb2.WeightVersion],
        max_staleness: int,
        group_timeout_s: float,
        budgets: Budgets,
    ) -> None:
        self._desk = desk
        self._sessions = sessions
        self._ledger = ledger
        self._newest = newest
        self._max_staleness = max_staleness
        self._group_timeout_s = group_timeout_s
        self._budgets = budgets

    async def play(
        self, plan: GroupPlan, tally: Tally, required_version: weights_pb2.WeightVersion | None
    ) -> GroupProgress:
        """Offers a group until it is complete, an episode has failed too often, or nobody comes for too long.

        Raises:
            RunError: The run cannot go on.
        """
        progress = GroupProgress(plan, self._budgets.attempts, tally)
        offer = Offer(progress, required_version, asyncio.get_running_loop().time())
        await self._adopt_earlier(offer)
        self._desk.add(offer)
        self._sessions.changed.fire()
        why = "the run was ended"
        try:
            await self._wait(offer)
            why = "its group was given up"
        finally:
            self._sessions.end_offer(offer, trajectory_pb2.FAILURE_REASON_CANCELLED, why)
        return progress

    async def _adopt_earlier(self, offer: Offer) -> None:
        """Takes over what agents had closed before the coordinator was started again, unless it is too old by now."""
        plan, version = offer.progress.plan, self._newest()
        arrivals = await self._ledger.arrivals(plan.environment_tag, plan.group_id)
        if not arrivals:
            return
        trajectories = [arrival.trajectory for arrival in arrivals]
        oldest = oldest_of_stored(trajectories, version.lineage, version.step)
        if version.step - oldest > self._max_staleness:
            await self._ledger.end_arrivals(plan.environment_tag, plan.group_id, "stale")
            return
        offer.progress.adopt(trajectories, oldest)
        offer.task_name = arrivals[0].task_name
        offer.named_by_agent = offer.task_name != plan.group_id

    async def _wait(self, offer: Offer) -> None:
        loop = asyncio.get_running_loop()
        while not offer.over:
            if self._sessions.failure is not None:
                raise self._sessions.failure
            end = self._quiet_since_s(offer) + self._group_timeout_s if not offer.progress.in_attempt else None
            if end is not None and loop.time() >= end:
                offer.progress.cause = (
                    f"no agent asked for {len(offer.free)} of its {offer.progress.plan.episodes} episodes during "
                    f"timeouts.group_s={self._group_timeout_s:g} s; start agents, or raise the limit"
                )
                return
            try:
                async with asyncio.timeout_at(end):
                    await self._sessions.changed.wait()
            except TimeoutError:
                continue

    def _quiet_since_s(self, offer: Offer) -> float:
        """Returns since when nobody has come: a group that is not begun waits its turn while agents play others."""
        if offer.task_name:
            return offer.quiet_since_s
        return max(offer.quiet_since_s, self._sessions.asked_s.get(offer.progress.plan.environment_tag, 0.0))
