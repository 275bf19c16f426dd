"""The ledger's file: SQLite, `run.db` in the run directory. Synchronous; `ledger.Ledger` is how it is used.

WAL with synchronous=FULL: when a method returns, what it wrote survives the loss of the process and of the machine.
Every method is one transaction. The schema itself holds what must never happen: a trajectory id is accepted once, an
episode of a group has one trajectory, and a trajectory enters at most one step of a lineage.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rollwire.coordinator.arrivals import (
    ARRIVALS_SCHEMA,
    Arrival,
    ArrivalState,
    add_arrival,
    end_arrivals,
    fate_of_group,
    knows_arrival,
    read_arrivals,
    take_arrivals,
)
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.groups import reason_name
from rollwire.coordinator.journal import (
    Execute,
    Journal,
    JournalStep,
    WaitingGroup,
    read_journal,
    read_step_groups,
    read_waiting_groups,
)
from rollwire.coordinator.ledger_schema import (
    FORMAT_VERSION,
    SCHEMA,
    CheckpointRecord,
    GroupRecord,
    GroupState,
    RunRecord,
    StepPlan,
    StepResult,
    ValidationRecord,
    VersionRecord,
)
from rollwire.v1 import trajectory_pb2

BUSY_TIMEOUT_S: Final = 10.0
"""How long a write waits for a reader that holds the file, such as a report being made."""


class LedgerError(RunError):
    """The ledger cannot be read or written, or refuses what would break an invariant."""


class OtherBatchError(LedgerError):
    """A step was planned before with another batch."""


class LedgerStore:
    """An open `run.db`. Every method raises `LedgerError` when the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._explained():
            # One thread at a time uses the connection, though not always the one that opened it.
            self._connection = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute("PRAGMA foreign_keys = ON")

    def create(self, run: RunRecord) -> int:
        """Writes the schema and the run into a new file and returns the epoch, 1."""
        with self._transaction() as execute:
            for statement in (*SCHEMA, *ARRIVALS_SCHEMA):
                execute(statement)
            execute(
                "INSERT INTO run (id, run_id, name, epoch, format_version, config, created, event_dir, working_dir, "
                "state) VALUES (1, ?, ?, 1, ?, ?, ?, ?, ?, 'starting')",
                (run.run_id, run.name, FORMAT_VERSION, run.config, run.created, run.event_dir, run.working_dir),
            )
        return 1

    def resume(self, config: str) -> Journal:
        """Begins another incarnation of the run, with its configuration, and returns what the earlier ones did."""
        with self._transaction() as execute:
            for statement in ARRIVALS_SCHEMA:
                execute(statement)
            execute("UPDATE run SET epoch = epoch + 1, config = ?, state = 'starting'", (config,))
            return read_journal(execute)

    def step_groups(self, step: JournalStep) -> list[list[trajectory_pb2.Trajectory]]:
        """Returns the trajectories that a step was planned with, see `journal.read_step_groups`."""
        with self._explained():
            return read_step_groups(self._connection.execute, step)

    def waiting_groups(self) -> list[WaitingGroup]:
        """Returns the groups that were accepted and that no step has consumed."""
        with self._explained():
            return read_waiting_groups(self._connection.execute)

    def set_state(self, state: str) -> None:
        """Records the state of the run, such as `running` or `finished`."""
        with self._transaction() as execute:
            execute("UPDATE run SET state = ?", (state,))

    def accept_group(self, record: GroupRecord, step: int) -> bool:
        """Accepts a complete group with all of its trajectories.

        Args:
            record: The group.
            step: Steps consumed when it was accepted.

        Returns:
            False if exactly this group had been accepted before; then nothing changes.

        Raises:
            LedgerError: The group or one of its trajectories was accepted before with another content.
        """
        with self._transaction() as execute:
            known = execute(
                "SELECT trajectory_id FROM trajectories WHERE group_id = ? ORDER BY episode_index", (record.group_id,)
            ).fetchall()
            if known:
                if [row[0] for row in known] == [item.trajectory_id for item in record.trajectories]:
                    return False
                raise LedgerError(f"group {record.group_id} was accepted before with other trajectories")
            _insert_group(execute, record, "accepted")
            for item in record.trajectories:
                _insert_trajectory(execute, item, step)
            take_arrivals(execute, record.trajectories)
        return True

    def drop_group(self, record: GroupRecord, state: GroupState) -> None:
        """Records a group that is given up: `failed` before it was accepted, or `stale` after."""
        with self._transaction() as execute:
            changed = execute("UPDATE groups SET state = ? WHERE group_id = ?", (state, record.group_id)).rowcount
            if not changed:
                _insert_group(execute, record, state)
            end_arrivals(execute, record.environment_tag, record.group_id, "dropped")

    def add_arrival(self, arrival: Arrival) -> bool:
        """Makes a trajectory durable that waits for its group; returns False when its id was accepted before.

        Raises:
            LedgerError: Another trajectory waits at its place in the group.
        """
        with self._transaction() as execute:
            return add_arrival(execute, arrival)

    def knows_arrival(self, trajectory_id: str) -> bool:
        """Tells whether a trajectory was accepted before, whatever became of it."""
        with self._explained():
            return knows_arrival(self._connection.execute, trajectory_id)

    def fate_of_group(self, tag: str, group_id: str) -> ArrivalState | None:
        """Returns what became of a group of which trajectories arrived; None when none did."""
        with self._explained():
            return fate_of_group(self._connection.execute, tag, group_id)

    def arrivals(self, tag: str | None = None, group_id: str | None = None) -> list[Arrival]:
        """Returns the trajectories that wait, of all groups or of one."""
        with self._explained():
            return read_arrivals(self._connection.execute, tag, group_id)

    def end_arrivals(self, tag: str, group_id: str, state: ArrivalState) -> None:
        """Gives up what waits of a group."""
        with self._transaction() as execute:
            end_arrivals(execute, tag, group_id, state)

    def plan_step(self, plan: StepPlan) -> None:
        """Records what a step is about to train, before the learner is asked. Repeating the same plan changes nothing.

        Raises:
            OtherBatchError: The step was planned with another batch.
            LedgerError: A trajectory entered another step of the lineage.
        """
        lineage = plan.base.lineage
        with self._transaction() as execute:
            known = execute("SELECT digest FROM steps WHERE lineage = ? AND step = ?", (lineage, plan.step)).fetchone()
            if known is not None:
                if known[0] == plan.digest:
                    return
                raise OtherBatchError(f"step {plan.step} of {lineage} was planned before with another batch")
            execute(
                "INSERT INTO steps (lineage, step, version_before, digest, state) VALUES (?, ?, ?, ?, 'planned')",
                (lineage, plan.step, plan.base.step, plan.digest),
            )
            for ids, trained in ((plan.trained, 1), (plan.filtered, 0)):
                for trajectory_id in ids:
                    execute(
                        "INSERT INTO step_trajectories (lineage, trajectory_id, step, trained) VALUES (?, ?, ?, ?)",
                        (lineage, trajectory_id, plan.step, trained),
                    )

    def commit_step(self, result: StepResult) -> None:
        """Records that a planned step is done. Repeating the same result changes nothing.

        Raises:
            LedgerError: The step is not planned.
        """
        key = (result.lineage, result.step)
        with self._transaction() as execute:
            changed = execute(
                "UPDATE steps SET state = 'committed', version_after = ?, metrics = ?, weights_digest = ?, "
                "progress = ? WHERE lineage = ? AND step = ? AND state = 'planned'",
                (
                    result.version_after,
                    json.dumps(dict(result.metrics)),
                    result.weights_digest,
                    json.dumps(asdict(result.progress)),
                    *key,
                ),
            ).rowcount
            if changed != 1:
                known = execute("SELECT weights_digest FROM steps WHERE lineage = ? AND step = ?", key).fetchone()
                if known == (result.weights_digest,):
                    return
                raise LedgerError(f"step {result.step} of {result.lineage} is not planned, so it cannot be committed")
            execute(
                "UPDATE groups SET state = 'consumed' WHERE group_id IN (SELECT group_id FROM trajectories "
                "JOIN step_trajectories USING (trajectory_id) WHERE lineage = ? AND step = ?)",
                key,
            )

    def add_checkpoint(self, record: CheckpointRecord, keep: int) -> None:
        """Records a checkpoint, and forgets all but the `keep` recorded last."""
        version = record.version
        row = (record.name, record.step, version.lineage, version.step, record.digest, record.path, record.size)
        with self._transaction() as execute:
            execute(
                "INSERT OR REPLACE INTO checkpoints (name, step, lineage, version, digest, path, bytes) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            execute(
                "DELETE FROM checkpoints WHERE rowid NOT IN "
                "(SELECT rowid FROM checkpoints ORDER BY rowid DESC LIMIT ?)",
                (keep,),
            )

    def prune(self, keep_bytes: int) -> int:
        """Empties the records of the oldest trajectories that no step waits for until the rest fits.

        What a run would have to train again from its oldest checkpoint on stays.

        Args:
            keep_bytes: Size of all records that may remain. Ids and scores always stay.

        Returns:
            Number of records emptied.
        """
        with self._transaction() as execute:
            (total,) = execute("SELECT COALESCE(SUM(LENGTH(record)), 0) FROM trajectories").fetchone()
            victims: list[tuple[str]] = []
            rows = execute(
                "SELECT trajectory_id, LENGTH(record) FROM trajectories JOIN groups USING (group_id) "
                "WHERE state != 'accepted' AND record IS NOT NULL AND trajectory_id NOT IN (SELECT trajectory_id "
                "FROM step_trajectories WHERE step >= (SELECT MIN(step) FROM checkpoints)) "
                "ORDER BY accepted_step, group_index"
            )
            for trajectory_id, size in rows:
                if total <= keep_bytes:
                    break
                victims.append((trajectory_id,))
                total -= size
            for victim in victims:
                execute("UPDATE trajectories SET record = NULL WHERE trajectory_id = ?", victim)
        return len(victims)

    def add_version(self, record: VersionRecord) -> None:
        """Records that a rollout server activated a version; a server that activates it again replaces the row."""
        version = record.version
        with self._transaction() as execute:
            execute(
                "INSERT OR REPLACE INTO versions (lineage, step, target, digest, received_bytes, fetch_s, pause_s) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    version.lineage,
                    version.step,
                    record.target,
                    record.digest,
                    record.received_bytes,
                    record.fetch_s,
                    record.pause_s,
                ),
            )

    def add_validation(self, records: Sequence[ValidationRecord]) -> None:
        """Records the episodes of one validation; one that is played again replaces the first."""
        with self._transaction() as execute:
            for item in records:
                execute(
                    "INSERT OR REPLACE INTO validations "
                    "(kind, step, environment_tag, start_index, environment_seed, score) VALUES (?, ?, ?, ?, ?, ?)",
                    (item.kind, item.step, item.environment_tag, item.start_index, item.environment_seed, item.score),
                )

    def close(self) -> None:
        """Closes the file."""
        with self._explained():
            self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[Execute]:
        """Runs a block as one transaction: it is durable when the block has left, or nothing of it happened."""
        with self._explained():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection.execute
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # on a full disk SQLite has rolled back already
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"the ledger {self.path} refuses a row: {error}") from error
        except sqlite3.Error as error:
            raise LedgerError(
                f"the ledger {self.path} cannot be used: {error}; check free space and permissions of its directory"
            ) from error


def _insert_group(execute: Execute, record: GroupRecord, state: GroupState) -> None:
    row: tuple[Any, ...] = (
        record.group_id,
        record.index,
        record.environment_tag,
        record.environment_seed,
        record.sampling_seed,
        record.attempts,
        state,
    )
    execute(
        "INSERT INTO groups (group_id, group_index, environment_tag, environment_seed, sampling_seed, attempts, state) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        row,
    )
    for failure in record.failures:
        execute(
            "INSERT INTO failures (group_id, episode_index, attempt, reason, message, turn) VALUES (?, ?, ?, ?, ?, ?)",
            (
                record.group_id,
                failure.episode_index,
                failure.attempt,
                reason_name(failure.reason),
                failure.message,
                failure.turn,
            ),
        )


def _insert_trajectory(execute: Execute, item: trajectory_pb2.Trajectory, step: int) -> None:
    execute(
        "INSERT INTO trajectories (trajectory_id, group_id, episode_index, attempt, score, accepted_step, record) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            item.trajectory_id,
            item.group_id,
            item.episode_index,
            item.attempt,
            item.score,
            step,
            item.SerializeToString(),
        ),
    )
