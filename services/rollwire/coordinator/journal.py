"""What a ledger says about the earlier incarnations of a run: steps, checkpoints, and groups that wait for a step.

A step may be there once for each lineage: when weights could not be continued bit for bit, the same batches were
trained again in another one. The row written last is the run's history.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rollwire.coordinator.ledger_schema import CheckpointRecord, Progress
from rollwire.v1 import trajectory_pb2, weights_pb2

Execute = Callable[..., sqlite3.Cursor]


@dataclass(frozen=True)
class JournalStep:
    """A step that was planned.

    Attributes:
        step: Its number, from 0.
        before: Version that it starts from.
        batch_digest: Digest of its batch.
        committed: True once it was done.
        version_after: Step of the version reached; None before.
        weights_digest: Digest of that version; empty before.
        progress: What the run had done with it.
        metrics: What batch and learner reported.
    """

    step: int
    before: weights_pb2.WeightVersion
    batch_digest: bytes
    committed: bool
    version_after: int | None
    weights_digest: bytes
    progress: Progress
    metrics: dict[str, float]

    @property
    def after(self) -> weights_pb2.WeightVersion:
        """Version that it reached, or will reach when it has samples."""
        step = self.before.step + 1 if self.version_after is None else self.version_after
        return weights_pb2.WeightVersion(lineage=self.before.lineage, step=step)


@dataclass(frozen=True)
class WaitingGroup:
    """A complete group that no step has consumed."""

    index: int
    attempts: int
    accepted_step: int
    trajectories: Sequence[trajectory_pb2.Trajectory]


@dataclass(frozen=True)
class Journal:
    """The history of a run.

    Attributes:
        run_id: Its identifier.
        epoch: Incarnation of the coordinator that reads this.
        steps: Its steps by ascending number, without gaps.
        checkpoints: What was saved, the newest last.
        first_digest: Digest of the weights that it began with; empty if none were served.
        known_indices: Indices of all groups that have ended, complete or not.
        dropped_groups: Groups that were given up.
        completed_episodes: Trajectories that were accepted.
        failed_episodes: Failures by reason.
    """

    run_id: str
    epoch: int
    steps: Sequence[JournalStep]
    checkpoints: Sequence[CheckpointRecord]
    first_digest: bytes
    known_indices: frozenset[int]
    dropped_groups: int
    completed_episodes: int
    failed_episodes: Counter[str]

    @property
    def committed(self) -> int:
        """Number of steps that are done, up to the first one that is not."""
        return next((step.step for step in self.steps if not step.committed), len(self.steps))

    def progress(self, steps_done: int) -> Progress | None:
        """Returns what the run had done after so many steps; None for the beginning."""
        return self.steps[steps_done - 1].progress if steps_done else None


def read_journal(execute: Execute) -> Journal:
    """Returns the history of the run."""
    run_id, epoch = execute("SELECT run_id, epoch FROM run").fetchone()
    steps = [
        _step(*row)
        for row in execute(
            "SELECT step, lineage, version_before, digest, state, version_after, weights_digest, progress, metrics "
            "FROM steps WHERE rowid IN (SELECT MAX(rowid) FROM steps GROUP BY step) ORDER BY step"
        )
    ]
    first = execute("SELECT digest FROM versions WHERE step = 0 ORDER BY rowid LIMIT 1").fetchone()
    states = dict(execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall())
    return Journal(
        run_id=run_id,
        epoch=epoch,
        steps=steps,
        checkpoints=[
            CheckpointRecord(name, step, weights_pb2.WeightVersion(lineage=lineage, step=version), *rest)
            for name, step, lineage, version, *rest in execute(
                "SELECT name, step, lineage, version, digest, path, bytes FROM checkpoints ORDER BY rowid"
            )
        ],
        first_digest=first[0] if first else b"",
        known_indices=frozenset(index for (index,) in execute("SELECT group_index FROM groups")),
        dropped_groups=states.get("failed", 0) + states.get("stale", 0),
        completed_episodes=execute("SELECT COUNT(*) FROM trajectories").fetchone()[0],
        failed_episodes=Counter(dict(execute("SELECT reason, COUNT(*) FROM failures GROUP BY reason").fetchall())),
    )


def count_steps(execute: Execute) -> tuple[int, int]:
    """Returns how many steps of the run's history are done, and how many after those are planned."""
    states = execute(
        "SELECT state FROM steps WHERE rowid IN (SELECT MAX(rowid) FROM steps GROUP BY step) ORDER BY step"
    ).fetchall()
    done = next((number for number, (state,) in enumerate(states) if state != "committed"), len(states))
    return done, len(states) - done


def read_step_groups(execute: Execute, step: JournalStep) -> list[list[trajectory_pb2.Trajectory]]:
    """Returns the trajectories that a step was planned with: groups by ascending index, each by episode index.

    Empty when a record is no longer there.
    """
    rows = execute(
        "SELECT group_index, record FROM step_trajectories JOIN trajectories USING (trajectory_id) "
        "JOIN groups USING (group_id) WHERE lineage = ? AND step = ? ORDER BY group_index, episode_index",
        (step.before.lineage, step.step),
    ).fetchall()
    if any(record is None for _, record in rows):
        return []
    return [items for _, items in _by_group(rows)]


def read_waiting_groups(execute: Execute) -> list[WaitingGroup]:
    """Returns the groups that were accepted and that no step has consumed, by ascending index."""
    rows = execute(
        "SELECT group_index, record FROM trajectories JOIN groups USING (group_id) WHERE state = 'accepted' "
        "ORDER BY group_index, episode_index"
    ).fetchall()
    facts = {
        index: (attempts, accepted)
        for index, attempts, accepted in execute(
            "SELECT group_index, attempts, MIN(accepted_step) FROM groups JOIN trajectories USING (group_id) "
            "WHERE state = 'accepted' GROUP BY group_index"
        )
    }
    return [WaitingGroup(index, *facts[index], items) for index, items in _by_group(rows)]


def _by_group(rows: Iterable[tuple[int, bytes]]) -> list[tuple[int, list[trajectory_pb2.Trajectory]]]:
    groups: dict[int, list[trajectory_pb2.Trajectory]] = {}
    for index, record in rows:
        groups.setdefault(index, []).append(trajectory_pb2.Trajectory.FromString(record))
    return list(groups.items())


def _step(
    step: int,
    lineage: str,
    version_before: int,
    digest: bytes,
    state: str,
    version_after: int | None,
    weights_digest: bytes | None,
    progress: str | None,
    metrics: str | None,
) -> JournalStep:
    return JournalStep(
        step=step,
        before=weights_pb2.WeightVersion(lineage=lineage, step=version_before),
        batch_digest=digest,
        committed=state == "committed",
        version_after=version_after,
        weights_digest=weights_digest or b"",
        progress=Progress(**json.loads(progress)) if progress else Progress(),
        metrics=json.loads(metrics) if metrics else {},
    )
