"""Which groups may start and which ones make the next batch. A pure state machine: no clock, no I/O.

Groups are started by ascending index. At training step `s` (batches consumed so far) with bound `k`, at most `(k + s
+ 1) * groups_per_step` groups have been started and not dropped: admission, not dropping, bounds the lag. A group
started at step `a` must be consumed at step `a + k` at the latest. Complete groups are taken oldest first, in the
order of completion among equals; a batch is ready when it is full and nothing that it leaves behind would become too
old before its turn. With `k = 0` this means: exactly the groups of the step, in the order of their index.

    start → RUNNING → complete → COMPLETE → take → TAKEN → advance (step + 1)
               └──────── drop ──────┘  a dropped group frees its place for the next index

A group that was played before it was started, as those that are pushed, counts as started when its weights were new. It
may then be too late for it: `too_late` says which groups cannot be consumed in time without making others too old.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass
class _Group:
    started_at: int
    completed_as: int | None = None
    early: bool = False


class Admission:
    """Admission and batch selection of one run.

    Args:
        groups_per_step: Groups that one training step consumes.
        max_staleness: Most steps that a group may lag when it is consumed.
        max_steps: Training steps of the run; groups beyond them are never started.
    """

    def __init__(self, groups_per_step: int, max_staleness: int, max_steps: int) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._max_steps = max_steps
        self._waiting: dict[int, _Group] = {}
        self._taken: list[int] = []
        self._consumed = 0
        self._completions = 0
        self._gaps: list[int] = []
        self.step = 0
        self.next_index = 0

    def restore(self, step: int, ended: Collection[int], complete: Mapping[int, int]) -> None:
        """Goes on where an earlier incarnation stopped.

        Groups that were running then are lost; they are started again, under their index.

        Args:
            step: Batches consumed.
            ended: Indices of all groups that were completed or dropped.
            complete: Those of them that wait for a step, ascending, with the step at which each was started.
        """
        self.step = step
        self._consumed = step * self._groups_per_step
        self.next_index = max(ended, default=-1) + 1
        self._gaps = sorted(set(range(self.next_index)) - set(ended))
        for index, started_at in complete.items():
            self._waiting[index] = _Group(started_at, early=True)
            self.complete(index)

    @property
    def running(self) -> int:
        """Number of groups started and neither complete nor dropped."""
        return sum(group.completed_as is None for group in self._waiting.values())

    def free_places(self) -> int:
        """Returns how many groups may be started now."""
        allowed = min(self._max_staleness + self.step + 1, self._max_steps) * self._groups_per_step
        return allowed - (self._consumed + len(self._taken) + len(self._waiting))

    def start(self) -> int:
        """Starts the next group and returns its index."""
        assert self.free_places() > 0, "a group was started without a free place"
        if self._gaps:
            index = self._gaps.pop(0)
        else:
            index = self.next_index
            self.next_index += 1
        self._waiting[index] = _Group(started_at=self.step)
        return index

    def complete(self, index: int, played_at: int | None = None) -> None:
        """Notes that all episodes of a group have results.

        Args:
            index: The group.
            played_at: Step at which its weights were new, where that may be before the group was started.
        """
        group = self._waiting[index]
        assert group.completed_as is None, f"group {index} completed twice"
        group.completed_as = self._completions
        self._completions += 1
        if played_at is not None and played_at < group.started_at:
            group.started_at, group.early = played_at, True

    def too_late(self) -> list[int]:
        """Returns the groups, played before they were started, that have to be dropped so that none becomes too old."""
        kept = [group.started_at for group in self._waiting.values() if not group.early]
        late = []
        for index, group in sorted(self._waiting.items(), key=lambda item: (item[1].started_at, item[0])):
            if not group.early:
                continue
            if self._in_time([*kept, group.started_at], self.step):
                kept.append(group.started_at)
            else:
                late.append(index)
        return late

    def drop(self, index: int) -> None:
        """Gives up a group, running or complete; the next index takes its place."""
        del self._waiting[index]

    def ready(self) -> list[int] | None:
        """Returns the indices of the next batch, ascending, or None while it has to wait for running groups."""
        order = sorted(
            (group.started_at, group.completed_as, index)
            for index, group in self._waiting.items()
            if group.completed_as is not None
        )
        batch = [index for _, _, index in order[: self._groups_per_step]]
        if len(batch) < self._groups_per_step or not self._leaves_nothing_stale(batch):
            return None
        return sorted(batch)

    def take(self, batch: list[int]) -> None:
        """Removes a ready batch; `advance` must follow once its step is done."""
        assert not self._taken, "a batch was taken while another one is in work"
        for index in batch:
            del self._waiting[index]
        self._taken = list(batch)

    def advance(self) -> None:
        """Ends the step whose batch was taken."""
        self._consumed += len(self._taken)
        self._taken = []
        self.step += 1

    def _leaves_nothing_stale(self, batch: list[int]) -> bool:
        """Tells whether all groups left behind can still be consumed in time, at full batches from the next step on."""
        left = [group.started_at for index, group in self._waiting.items() if index not in batch]
        return self._in_time(left, self.step + 1)

    def _in_time(self, starts: list[int], step: int) -> bool:
        """Tells whether groups started at these steps can all be consumed in time, oldest first, from a step on."""
        return all(
            step + position // self._groups_per_step <= started_at + self._max_staleness
            for position, started_at in enumerate(sorted(starts))
        )
