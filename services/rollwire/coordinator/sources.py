"""Where the episodes of a training group come from: one interface, whoever plays them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rollwire.coordinator.groups import GroupPlan, GroupProgress, Tally
from rollwire.v1 import weights_pb2


class GroupSource(Protocol):
    """Brings the episodes of one group."""

    async def play(
        self, plan: GroupPlan, tally: Tally, required_version: weights_pb2.WeightVersion | None
    ) -> GroupProgress:
        """Returns once every episode of a group has a trajectory, or the group is given up.

        Args:
            plan: The group.
            tally: Where its episodes are counted.
            required_version: Version that must play it; None for whatever is served.

        Raises:
            RunError: The run cannot go on.
        """


class SourceByTag:
    """Asks the source of a group's environment tag.

    Args:
        sources: Sources by tag.
    """

    def __init__(self, sources: Mapping[str, GroupSource]) -> None:
        self._sources = sources

    async def play(
        self, plan: GroupPlan, tally: Tally, required_version: weights_pb2.WeightVersion | None
    ) -> GroupProgress:
        """Plays a group, see `GroupSource.play`."""
        return await self._sources[plan.environment_tag].play(plan, tally, required_version)
