"""The ledger's table of trajectories that came one by one, from agents and pushers, before their group is complete.

A row is written before the sender is answered, so what was acknowledged is durable, and an id is accepted once. When
the group is accepted its trajectories move to the tables of groups; the row stays, without the record, as the memory
of its id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rollwire.coordinator.journal import Execute
from rollwire.v1 import trajectory_pb2

ArrivalState = Literal["waiting", "taken", "stale", "incomplete", "dropped"]
"""`waiting` for its group, `taken` with its group, `stale` and `incomplete` given up, `dropped` with the group."""

ARRIVALS_SCHEMA: Final = (
    """
    CREATE TABLE IF NOT EXISTS arrivals (
        trajectory_id TEXT PRIMARY KEY,
        environment_tag TEXT NOT NULL,
        group_id TEXT NOT NULL,
        episode_index INTEGER NOT NULL,
        task_name TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('waiting', 'taken', 'stale', 'incomplete', 'dropped')),
        record BLOB
    )
    """,
    """
    CREATE UNIQUE INDEX IF NOT EXISTS arrivals_waiting ON arrivals (environment_tag, group_id, episode_index)
    WHERE state = 'waiting'
    """,
    "CREATE INDEX IF NOT EXISTS arrivals_by_group ON arrivals (environment_tag, group_id)",
)
"""Also made when a run is resumed that an earlier build began."""


@dataclass(frozen=True)
class Arrival:
    """One trajectory that waits for its group.

    Attributes:
        trajectory: The trajectory.
        task_name: Name that an agent gave its task; empty for pushed trajectories.
    """

    trajectory: trajectory_pb2.Trajectory
    task_name: str = ""


def add_arrival(execute: Execute, arrival: Arrival) -> bool:
    """Adds a trajectory; returns False, and changes nothing, when its id is known."""
    item = arrival.trajectory
    if knows_arrival(execute, item.trajectory_id):
        return False
    execute(
        "INSERT INTO arrivals (trajectory_id, environment_tag, group_id, episode_index, task_name, state, record) "
        "VALUES (?, ?, ?, ?, ?, 'waiting', ?)",
        (
            item.trajectory_id,
            item.environment_tag,
            item.group_id,
            item.episode_index,
            arrival.task_name,
            item.SerializeToString(),
        ),
    )
    return True


def knows_arrival(execute: Execute, trajectory_id: str) -> bool:
    """Tells whether a trajectory was accepted before, whatever became of it."""
    return execute("SELECT 1 FROM arrivals WHERE trajectory_id = ?", (trajectory_id,)).fetchone() is not None


def fate_of_group(execute: Execute, tag: str, group_id: str) -> ArrivalState | None:
    """Returns what became of the first trajectory of a group; None when none was accepted."""
    row = execute(
        "SELECT state FROM arrivals WHERE environment_tag = ? AND group_id = ? ORDER BY rowid LIMIT 1", (tag, group_id)
    ).fetchone()
    return row[0] if row else None


def read_arrivals(execute: Execute, tag: str | None = None, group_id: str | None = None) -> list[Arrival]:
    """Returns what waits, of all groups or of one, in the order of arrival."""
    rows = execute(
        "SELECT record, task_name FROM arrivals WHERE state = 'waiting' "
        "AND (:tag IS NULL OR environment_tag = :tag AND group_id = :group) ORDER BY rowid",
        {"tag": tag, "group": group_id},
    )
    return [Arrival(trajectory_pb2.Trajectory.FromString(record), task_name) for record, task_name in rows]


def end_arrivals(execute: Execute, tag: str, group_id: str, state: ArrivalState) -> None:
    """Gives up what waits of a group."""
    execute(
        "UPDATE arrivals SET state = ?, record = NULL WHERE environment_tag = ? AND group_id = ? AND state = 'waiting'",
        (state, tag, group_id),
    )


def take_arrivals(execute: Execute, trajectories: Sequence[trajectory_pb2.Trajectory]) -> None:
    """Notes that trajectories went on with their group; those that never were here change nothing."""
    for item in trajectories:
        execute(
            "UPDATE arrivals SET state = 'taken', record = NULL WHERE trajectory_id = ? AND state = 'waiting'",
            (item.trajectory_id,),
        )
