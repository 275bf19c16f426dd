"""Takes pushed trajectories in: checked, durable before they are answered, each exactly once."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from rollwire.coordinator.arrivals import Arrival
from rollwire.coordinator.intake import LEFT_BEHIND, oldest_of_stored
from rollwire.coordinator.ledger import Ledger
from rollwire.coordinator.pushed_checks import RejectedError, Terms, check_identity, check_terms
from rollwire.coordinator.pushed_groups import PushedGroups
from rollwire.coordinator.run_gate import RunGate
from rollwire.coordinator.tasks import Pulse
from rollwire.rpc.versions import version_text
from rollwire.serving.logs import get_logger
from rollwire.v1 import coordinator_pb2, trajectory_pb2, weights_pb2

ID_PREFIX: Final = "pushed/"
"""Before the ids of pushed trajectories in the ledger, so that no pusher can take an id of the run's own."""

LOOK_S: Final = 1.0
"""Pause between two looks for room when nothing changes but the time."""

MAX_STALE_GROUPS: Final = 4096
_GROUP: Final = coordinator_pb2.SUBMISSION_REJECTION_GROUP
_log = get_logger(__name__)


class StaleError(Exception):
    """A trajectory or its group is too old; the text says why."""


class Submissions:
    """All pushed trajectories of a run that wait for a step.

    Attributes:
        counts: Answers by status, such as `accepted`, and groups given up, as `groups_stale` and `groups_incomplete`.
        changed: Fires when a group is complete or room is made.

    Args:
        groups: The groups.
        terms: Terms by tag.
        ledger: Where trajectories become durable.
        gate: Whether the run takes trajectories.
        newest: Returns the version that the learner has reached.
        max_staleness: Most versions that a trained token may lag.
        group_timeout_s: How long a group may stay incomplete.
    """

    def __init__(
        self,
        groups: PushedGroups,
        terms: Mapping[str, Terms],
        ledger: Ledger,
        gate: RunGate,
        newest: Callable[[], weights_pb2.WeightVersion],
        max_staleness: int,
        group_timeout_s: float,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.changed = Pulse()
        self._groups = groups
        self._terms = terms
        self._ledger = ledger
        self._gate = gate
        self._newest = newest
        self._max_staleness = max_staleness
        self._group_timeout_s = group_timeout_s
        self._stale: OrderedDict[str, None] = OrderedDict()
        self._lock = asyncio.Lock()

    async def restore(self) -> None:
        """Takes over what an earlier incarnation of the coordinator had accepted."""
        now_s, version = asyncio.get_running_loop().time(), self._newest()
        for arrival in await self._ledger.arrivals():
            item = arrival.trajectory
            if item.environment_tag not in self._terms:
                continue
            self._groups.add(item, oldest_of_stored([item], version.lineage, version.step), now_s)
        await self.clear_out()

    async def submit(self, trajectory: trajectory_pb2.Trajectory) -> coordinator_pb2.SubmitTrajectoriesResponse:
        """Returns the fate of a trajectory; waits while there is no room for its group.

        Raises:
            RollwireError: The run has ended, or has not begun.
        """
        answer = coordinator_pb2.SubmitTrajectoriesResponse(trajectory_id=trajectory.trajectory_id[:128])
        try:
            answer.status = await self._submit(trajectory)
        except StaleError as error:
            answer.status = coordinator_pb2.SUBMISSION_STATUS_STALE
            answer.message = str(error)
        except RejectedError as error:
            answer.status = coordinator_pb2.SUBMISSION_STATUS_REJECTED
            answer.rejection, answer.message = error.rejection, error.message
        name = coordinator_pb2.SubmissionStatus.Name(answer.status).removeprefix("SUBMISSION_STATUS_").lower()
        self.counts[name] += 1
        if answer.message:
            _log.info("trajectory not accepted", trajectory=answer.trajectory_id, status=name, why=answer.message)
        return answer

    async def clear_out(self) -> None:
        """Gives up groups that are too old or that nobody completed."""
        now_s, version = asyncio.get_running_loop().time(), self._newest()
        for group in list(self._groups.pop_stale(version.step - self._max_staleness)):
            self._remember_stale(group.group_id)
            self.counts["groups_stale"] += 1
            await self._ledger.end_arrivals(group.tag, group.group_id, "stale")
        for group in list(self._groups.pop_expired(now_s, self._group_timeout_s)):
            self.counts["groups_incomplete"] += 1
            _log.warning("pushed group stayed incomplete", group=group.group_id, episodes=len(group.episodes))
            await self._ledger.end_arrivals(group.tag, group.group_id, "incomplete")

    async def _submit(self, trajectory: trajectory_pb2.Trajectory) -> coordinator_pb2.SubmissionStatus.ValueType:
        check_identity(trajectory)
        terms = self._terms.get(trajectory.environment_tag)
        if terms is None:
            raise RejectedError(
                coordinator_pb2.SUBMISSION_REJECTION_UNKNOWN_TAG,
                f"environment_tag is {trajectory.environment_tag!r}; the run takes trajectories pushed as "
                f"{', '.join(sorted(self._terms)) or 'nothing'}",
            )
        stored = trajectory_pb2.Trajectory()
        stored.CopyFrom(trajectory)
        stored.trajectory_id = ID_PREFIX + trajectory.trajectory_id
        # Before the terms: what was accepted once stays a duplicate when it is too old by now.
        if await self._ledger.knows_arrival(stored.trajectory_id):
            return coordinator_pb2.SUBMISSION_STATUS_DUPLICATE
        await asyncio.to_thread(check_terms, trajectory, terms)
        while True:
            self._gate.check()
            async with self._lock:
                if await self._ledger.knows_arrival(stored.trajectory_id):  # by another stream, meanwhile
                    return coordinator_pb2.SUBMISSION_STATUS_DUPLICATE
                await self.clear_out()
                oldest = await self._oldest(trajectory)
                await self._check_group(trajectory)
                known = self._groups.find(trajectory.group_id) is not None
                if known or self._groups.has_room(trajectory.environment_tag):
                    await self._ledger.add_arrival(Arrival(stored))
                    self._groups.add(stored, oldest, asyncio.get_running_loop().time())
                    self.changed.fire()
                    return coordinator_pb2.SUBMISSION_STATUS_ACCEPTED
            await self.wait(LOOK_S)

    async def wait(self, limit_s: float) -> None:
        """Waits until something changes, at most for so long."""
        try:
            async with asyncio.timeout(limit_s):
                await self.changed.wait()
        except TimeoutError:
            return

    async def _oldest(self, trajectory: trajectory_pb2.Trajectory) -> int:
        """Returns the step of the oldest weights of a trajectory. Raises `StaleError` or `RejectedError`."""
        version = self._newest()
        found = [span.version for sequence in trajectory.sequences for span in sequence.version_spans]
        for seen in found:
            if seen.lineage == version.lineage and seen.step > version.step:
                raise RejectedError(
                    coordinator_pb2.SUBMISSION_REJECTION_MALFORMED,
                    f"a token is said to be drawn by {version_text(seen)}; the newest is {version_text(version)}",
                )
        foreign = next((seen for seen in found if seen.lineage != version.lineage), None)
        oldest = min(seen.step for seen in found)
        if foreign is None and version.step - oldest <= self._max_staleness:
            return oldest
        group = self._groups.find(trajectory.group_id)
        if group is not None and group.tag == trajectory.environment_tag:
            group.oldest_step = LEFT_BEHIND
            await self.clear_out()
        self._remember_stale(trajectory.group_id)
        shown = version_text(foreign) if foreign is not None else str(oldest)
        raise StaleError(
            f"a token was drawn by version {shown}; the newest is {version_text(version)} and max_staleness is "
            f"{self._max_staleness}"
        )

    async def _check_group(self, trajectory: trajectory_pb2.Trajectory) -> None:
        """Raises `StaleError` or `RejectedError` when a trajectory does not fit into its group."""
        if trajectory.group_id in self._stale:
            raise StaleError(f"group {trajectory.group_id} is too old, as another episode of it has shown")
        misfit = self._groups.misfit(trajectory)
        if misfit:
            raise RejectedError(_GROUP, misfit)
        if self._groups.find(trajectory.group_id) is not None:
            return
        for tag in self._terms:
            fate = await self._ledger.fate_of_group(tag, trajectory.group_id)
            if fate == "stale":
                raise StaleError(f"group {trajectory.group_id} was given up: it was too old")
            if fate == "incomplete":
                raise RejectedError(
                    _GROUP,
                    f"group {trajectory.group_id} was given up: it was incomplete for more than timeouts.group_s="
                    f"{self._group_timeout_s:g} s",
                )
            if fate is not None:
                raise RejectedError(_GROUP, f"group {trajectory.group_id} was complete before; take another group_id")

    def _remember_stale(self, group_id: str) -> None:
        self._stale[group_id] = None
        while len(self._stale) > MAX_STALE_GROUPS:
            self._stale.popitem(last=False)
