"""Keeps training groups in flight and hands complete batches to the step loop.

As many groups run as `Admission` allows, on whichever servers have room. A complete group is in the ledger before it
counts. With `max_staleness` 0 the pump is idle while the learner trains; above 0 it plays on. There is no other
difference between the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal, NamedTuple

from rollwire.coordinator.admission import Admission
from rollwire.coordinator.budgets import FailureBudget
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.groups import GroupProgress, Tally
from rollwire.coordinator.intake import ProtocolError, oldest_step
from rollwire.coordinator.journal import Journal, WaitingGroup
from rollwire.coordinator.ledger import Ledger
from rollwire.coordinator.ledger_schema import GroupRecord
from rollwire.coordinator.planner import Planner
from rollwire.coordinator.sources import GroupSource
from rollwire.coordinator.tasks import Pulse
from rollwire.v1 import trajectory_pb2, weights_pb2


class TakenBatch(NamedTuple):
    """Groups that a step consumes.

    Attributes:
        groups: Trajectories of each group by episode index; groups by ascending index.
        lags: For each trajectory, in the same order, by how many versions its oldest token lags.
    """

    groups: list[list[trajectory_pb2.Trajectory]]
    lags: list[int]


class RolloutPump:
    """Plays the training groups of a run.

    Attributes:
        tally: Episodes requested, completed and failed.
        dropped: Groups given up, failed or stale.

    Args:
        admission: Which groups may start.
        planner: What each group is.
        source: Plays one group.
        ledger: Where complete groups become durable.
        budget: Ends the run when groups keep failing.
        max_staleness: Most versions that a trained token may lag.
    """

    def __init__(
        self,
        admission: Admission,
        planner: Planner,
        source: GroupSource,
        ledger: Ledger,
        budget: FailureBudget,
        max_staleness: int,
    ) -> None:
        self.tally = Tally()
        self.dropped = 0
        self._admission = admission
        self._planner = planner
        self._source = source
        self._ledger = ledger
        self._budget = budget
        # Stale groups were complete, which the other budget counts as success.
        self._stale_budget = FailureBudget(budget.limit)
        self._max_staleness = max_staleness
        self._version = weights_pb2.WeightVersion()
        self._complete: dict[int, GroupProgress] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._changed = Pulse()

    @property
    def in_flight(self) -> int:
        """Number of groups being played."""
        return len(self._tasks)

    async def restore(
        self, step: int, journal: Journal, waiting: Sequence[WaitingGroup], version: weights_pb2.WeightVersion
    ) -> None:
        """Goes on where an earlier incarnation stopped; nothing that it acknowledged is lost.

        A waiting group that other weights than the present lineage's have played is given up as stale, and replaced.

        Args:
            step: Steps done.
            journal: What the earlier incarnations did.
            waiting: Complete groups that no step has consumed.
            version: Version that the learner is at.
        """
        self.tally.completed = journal.completed_episodes
        self.tally.failed = journal.failed_episodes.copy()
        self.tally.requested = self.tally.completed + self.tally.failed.total()
        self.dropped = journal.dropped_groups
        started: dict[int, int] = {}
        for group in waiting:
            plan = self._planner.training_group(group.index)
            progress = GroupProgress.restored(plan, group.attempts, group.trajectories)
            try:
                oldest = min(oldest_step(item, version.lineage, version.step) for item in group.trajectories)
            except ProtocolError:
                await self._ledger.drop_group(_record(progress), "stale")
                self.dropped += 1
                continue
            self._complete[group.index] = progress
            # Weights that are n versions old were served n steps ago at least.
            started[group.index] = max(0, step - (version.step - oldest))
        self._admission.restore(step, journal.known_indices, started)

    def start(self, version: weights_pb2.WeightVersion) -> None:
        """Starts playing with the version that all servers hold now."""
        self._version = version
        self._fill()

    def advance(self, version: weights_pb2.WeightVersion) -> None:
        """Ends a step: its batch is consumed and all servers hold `version`."""
        self._admission.advance()
        self.start(version)

    async def next_batch(self) -> TakenBatch:
        """Waits for the groups of the next step.

        Groups with a token older than the bound are given up and replaced; admission makes that impossible unless a
        server plays with weights that it should not have.

        Raises:
            RunError: Groups keep failing, or a server broke the contract.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            for index in self._admission.too_late():  # pushed groups: no server is to blame
                await self._give_up(index, self._complete.pop(index), "stale", blame=False)
            indices = self._admission.ready()
            if indices is None:
                await self._changed.wait()
                continue
            lags = {index: self._lags(index) for index in indices}
            stale = [index for index in indices if max(lags[index]) > self._max_staleness]
            if stale:
                for index in stale:
                    await self._give_up(index, self._complete.pop(index), "stale")
                continue
            self._stale_budget.succeeded()
            self._admission.take(indices)
            groups = [self._complete.pop(index).trajectories for index in indices]
            return TakenBatch(groups, [lag for index in indices for lag in lags[index]])

    async def close(self) -> None:
        """Cancels what is being played."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _fill(self) -> None:
        while self._admission.free_places() > 0:
            task = asyncio.get_running_loop().create_task(self._run(self._admission.start()))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and self._failure is None:
            self._failure = task.exception()
        self._changed.fire()

    async def _run(self, index: int) -> None:
        """Plays one group and records how it ended."""
        # Without staleness every token must come from this very version; with it, a push may come in between.
        required = self._version if self._max_staleness == 0 else None
        progress = await self._source.play(self._planner.training_group(index), self.tally, required)
        if not progress.complete:
            await self._give_up(index, progress, "failed")
            return
        await self._ledger.accept_group(_record(progress), self._admission.step)
        self._complete[index] = progress
        played_at = None
        if progress.oldest_step is not None:
            played_at = self._admission.step - (self._version.step - progress.oldest_step)
        self._admission.complete(index, played_at)
        self._budget.succeeded()

    async def _give_up(
        self, index: int, progress: GroupProgress, state: Literal["failed", "stale"], *, blame: bool = True
    ) -> None:
        """Records a group that is given up and starts the one that takes its place."""
        await self._ledger.drop_group(_record(progress), state)
        self._admission.drop(index)
        self.dropped += 1
        plan = progress.plan
        what = f"{plan.group_id} of {plan.environment_tag}, seed {plan.environment_seed}"
        if state == "failed":
            self._budget.failed(what, progress.failures, progress.cause)
        elif blame:
            self._stale_budget.failed(f"{what}, was older than max_staleness", progress.failures)
        self._fill()

    def _lags(self, index: int) -> list[int]:
        try:
            return [
                self._version.step - oldest_step(trajectory, self._version.lineage, self._version.step)
                for trajectory in self._complete[index].trajectories
            ]
        except ProtocolError as error:
            raise RunError(f"a rollout server broke the contract: {error}") from error


def _record(progress: GroupProgress) -> GroupRecord:
    plan = progress.plan
    return GroupRecord(
        group_id=plan.group_id,
        index=plan.index,
        environment_tag=plan.environment_tag,
        environment_seed=plan.environment_seed,
        sampling_seed=plan.sampling_seed,
        attempts=progress.attempt,
        trajectories=progress.trajectories,
        failures=progress.failures,
    )
