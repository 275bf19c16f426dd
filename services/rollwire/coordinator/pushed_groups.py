"""Groups of pushed trajectories on their way to a step. Pure: no clock, no I/O; the trajectories are in the ledger.

first episode ──► incomplete ── all episodes ──► complete ── a training group takes it ──► taken
                      └── too long ──► dropped            └── its weights are too old ──► dropped, from either
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollwire.v1 import trajectory_pb2


@dataclass(eq=False)
class PushedGroup:
    """One group.

    Attributes:
        tag: Environment tag.
        group_id: Identifier that the pusher chose.
        seed: Environment seed that its episodes share.
        since_s: When the first episode came.
        oldest_step: Step of the oldest weights that drew a token of it.
        episodes: Episodes that are there.
    """

    tag: str
    group_id: str
    seed: int
    since_s: float
    oldest_step: int
    episodes: set[int] = field(default_factory=set)


class PushedGroups:
    """All groups that wait.

    Args:
        size: Episodes of a group.
        capacity: Groups of one tag that may wait.
    """

    def __init__(self, size: int, capacity: int) -> None:
        self.size = size
        self._capacity = capacity
        self._groups: dict[str, PushedGroup] = {}

    def find(self, group_id: str) -> PushedGroup | None:
        """Returns a group that waits."""
        return self._groups.get(group_id)

    def waiting(self, tag: str) -> int:
        """Returns how many groups of a tag wait, complete or not."""
        return sum(group.tag == tag for group in self._groups.values())

    def has_room(self, tag: str) -> bool:
        """Tells whether another group of a tag may begin."""
        return self.waiting(tag) < self._capacity

    def misfit(self, trajectory: trajectory_pb2.Trajectory) -> str:
        """Returns why a trajectory cannot belong to its group, or an empty text."""
        if trajectory.episode_index >= self.size:
            return f"episode_index is {trajectory.episode_index}; a group has {self.size} episodes, counted from 0"
        group = self._groups.get(trajectory.group_id)
        if group is None:
            return ""
        if group.tag != trajectory.environment_tag:
            return f"group {group.group_id} is of the tag {group.tag!r}"
        if group.seed != trajectory.environment_seed:
            return (
                f"group {group.group_id} has the environment_seed {group.seed}, this is {trajectory.environment_seed}"
            )
        if trajectory.episode_index in group.episodes:
            return f"episode {trajectory.episode_index} of group {group.group_id} came before, as another trajectory"
        return ""

    def add(self, trajectory: trajectory_pb2.Trajectory, oldest_step: int, now_s: float) -> None:
        """Adds a trajectory that fits and is durable."""
        group = self._groups.get(trajectory.group_id)
        if group is None:
            group = PushedGroup(
                trajectory.environment_tag, trajectory.group_id, trajectory.environment_seed, now_s, oldest_step
            )
            self._groups[trajectory.group_id] = group
        group.oldest_step = min(group.oldest_step, oldest_step)
        group.episodes.add(trajectory.episode_index)

    def take(self, tag: str) -> PushedGroup | None:
        """Removes and returns the complete group of a tag whose weights are the oldest; None when there is none."""
        complete = [group for group in self._groups.values() if group.tag == tag and len(group.episodes) == self.size]
        if not complete:
            return None
        chosen = min(complete, key=lambda group: group.oldest_step)
        return self._groups.pop(chosen.group_id)

    def pop_stale(self, least_step: int) -> Iterator[PushedGroup]:
        """Removes and yields the groups with a token of weights older than a step."""
        for group in [group for group in self._groups.values() if group.oldest_step < least_step]:
            yield self._groups.pop(group.group_id)

    def pop_expired(self, now_s: float, limit_s: float) -> Iterator[PushedGroup]:
        """Removes and yields the incomplete groups that began too long ago."""
        for group in list(self._groups.values()):
            if len(group.episodes) < self.size and now_s - group.since_s > limit_s:
                yield self._groups.pop(group.group_id)
