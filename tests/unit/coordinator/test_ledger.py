from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollwire.coordinator.ledger import Ledger
from rollwire.coordinator.ledger_schema import (
    CheckpointRecord,
    GroupRecord,
    Progress,
    RunRecord,
    StepPlan,
    StepResult,
    ValidationRecord,
    VersionRecord,
)
from rollwire.coordinator.ledger_store import LedgerError, LedgerStore
from rollwire.v1 import trajectory_pb2, weights_pb2

Maker = Callable[..., trajectory_pb2.Trajectory]
RUN = RunRecord("run-1", "name", "run: {}", "2026-01-01T00:00:00+00:00", "/events", "/here")
BASE = weights_pb2.WeightVersion(lineage="line", step=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LedgerStore]:
    store = LedgerStore(tmp_path / "run.db")
    assert store.create(RUN) == 1
    yield store
    store.close()


def record(make: Maker, index: int, *, episodes: int = 2, failures: int = 0) -> GroupRecord:
    group = f"g{index:08d}"
    return GroupRecord(
        group_id=group,
        index=index,
        environment_tag="FrozenLake",
        environment_seed=2**63 - 1,
        sampling_seed=0,
        attempts=1 + failures,
        trajectories=[make(group, episode, float(episode)) for episode in range(episodes)],
        failures=[
            trajectory_pb2.EpisodeFailure(
                episode_index=0,
                attempt=attempt,
                reason=trajectory_pb2.FAILURE_REASON_ENVIRONMENT_ERROR,
                message="boom",
                turn=3,
            )
            for attempt in range(failures)
        ],
    )


def plan(step: int, trained: list[str], filtered: list[str], digest: bytes = b"d" * 32) -> StepPlan:
    return StepPlan(step=step, base=BASE, digest=digest, trained=trained, filtered=filtered)


def result(step: int, metrics: dict[str, float] | None = None, digest: bytes = b"w" * 32) -> StepResult:
    return StepResult(step, "line", step + 1, digest, metrics or {}, Progress(samples=4 * (step + 1)))


def rows(store: LedgerStore, query: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(store.path) as connection:
        return connection.execute(query).fetchall()


def test_the_file_is_as_durable_as_sqlite_can_be(store: LedgerStore) -> None:
    assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert rows(store, "SELECT run_id, epoch, format_version, state FROM run") == [("run-1", 1, 2, "starting")]


def test_an_accepted_group_is_there_with_its_trajectories_and_failures(
    store: LedgerStore, make_trajectory: Maker
) -> None:
    group = record(make_trajectory, 4, failures=1)
    assert store.accept_group(group, step=2)
    assert rows(store, "SELECT group_id, group_index, environment_seed, attempts, state FROM groups") == [
        ("g00000004", 4, 2**63 - 1, 2, "accepted")
    ]
    (first, second) = rows(store, "SELECT trajectory_id, score, accepted_step, record FROM trajectories ORDER BY 1")
    assert first[:3] == ("g00000004.0.0", 0.0, 2)
    assert trajectory_pb2.Trajectory.FromString(second[3]) == group.trajectories[1]  # type: ignore[arg-type]
    assert rows(store, "SELECT reason, message, turn FROM failures") == [("environment_error", "boom", 3)]


def test_accepting_twice_changes_nothing(store: LedgerStore, make_trajectory: Maker) -> None:
    assert store.accept_group(record(make_trajectory, 0), step=0)
    assert not store.accept_group(record(make_trajectory, 0), step=1)
    assert rows(store, "SELECT COUNT(*), MAX(accepted_step) FROM trajectories") == [(2, 0)]


def test_another_content_under_the_same_group_is_refused(store: LedgerStore, make_trajectory: Maker) -> None:
    store.accept_group(record(make_trajectory, 0), step=0)
    with pytest.raises(LedgerError, match="accepted before with other trajectories"):
        store.accept_group(record(make_trajectory, 0, episodes=3), step=0)


def test_a_trajectory_id_is_accepted_once_whatever_its_group(store: LedgerStore, make_trajectory: Maker) -> None:
    store.accept_group(record(make_trajectory, 0), step=0)
    thief = record(make_trajectory, 1)
    thief.trajectories[1].trajectory_id = "g00000000.1.0"
    with pytest.raises(LedgerError, match="UNIQUE"):
        store.accept_group(thief, step=0)
    assert rows(store, "SELECT COUNT(*) FROM groups") == [(1,)], "the refused group left nothing behind"


def test_a_trajectory_enters_one_step_of_a_lineage(store: LedgerStore, make_trajectory: Maker) -> None:
    """I1."""
    store.accept_group(record(make_trajectory, 0), step=0)
    ids = ["g00000000.0.0", "g00000000.1.0"]
    store.plan_step(plan(0, ids[:1], ids[1:]))
    store.commit_step(result(0, {"actor/pg_loss": 0.5}))
    for trajectory_id in ids:
        with pytest.raises(LedgerError, match="UNIQUE"):
            store.plan_step(plan(1, [trajectory_id], []))
    assert rows(store, "SELECT step, version_before, version_after, state, metrics FROM steps") == [
        (0, 0, 1, "committed", '{"actor/pg_loss": 0.5}')
    ]
    assert rows(store, "SELECT state FROM groups") == [("consumed",)]
    other = StepPlan(0, weights_pb2.WeightVersion(lineage="other"), b"e" * 32, ids, [])
    store.plan_step(other)  # another lineage may train it: the first one is lost


def test_planning_is_idempotent_by_digest(store: LedgerStore, make_trajectory: Maker) -> None:
    store.accept_group(record(make_trajectory, 0), step=0)
    for _ in range(2):
        store.plan_step(plan(0, ["g00000000.0.0"], []))
    with pytest.raises(LedgerError, match="planned before with another batch"):
        store.plan_step(plan(0, ["g00000000.1.0"], [], digest=b"x" * 32))


def test_only_what_was_accepted_can_be_planned_and_only_what_was_planned_committed(store: LedgerStore) -> None:
    with pytest.raises(LedgerError, match="FOREIGN KEY"):
        store.plan_step(plan(0, ["nobody"], []))
    with pytest.raises(LedgerError, match="not planned"):
        store.commit_step(result(0))


def test_dropped_groups_keep_their_failures(store: LedgerStore, make_trajectory: Maker) -> None:
    store.drop_group(record(make_trajectory, 0, episodes=0, failures=3), "failed")
    store.accept_group(record(make_trajectory, 1), step=0)
    store.drop_group(record(make_trajectory, 1), "stale")
    assert rows(store, "SELECT group_index, state FROM groups ORDER BY 1") == [(0, "failed"), (1, "stale")]
    assert rows(store, "SELECT COUNT(*) FROM failures") == [(3,)]


def test_pruning_empties_the_oldest_consumed_records_only(store: LedgerStore, make_trajectory: Maker) -> None:
    for index in range(3):
        store.accept_group(record(make_trajectory, index), step=index)
    for step in range(2):
        ids = [f"g{step:08d}.{episode}.0" for episode in range(2)]
        store.plan_step(plan(step, ids, []))
        store.commit_step(result(step))
    size = len(make_trajectory("g00000000", 0, 1.0).SerializeToString())
    assert store.prune(100 * size) == 0
    assert store.prune(3 * size) == 3
    assert rows(store, "SELECT trajectory_id FROM trajectories WHERE record IS NULL ORDER BY 1") == [
        ("g00000000.0.0",),
        ("g00000000.1.0",),
        ("g00000001.0.0",),
    ]
    assert store.prune(0) == 1, "what waits for its step is kept"


def test_pruning_keeps_what_the_oldest_checkpoint_needs(store: LedgerStore, make_trajectory: Maker) -> None:
    for step in range(4):
        store.accept_group(record(make_trajectory, step), step=step)
        store.plan_step(plan(step, [f"g{step:08d}.{episode}.0" for episode in range(2)], []))
        store.commit_step(result(step))
    for step in (0, 2, 3):
        version = weights_pb2.WeightVersion(lineage="line", step=step)
        store.add_checkpoint(CheckpointRecord(f"c{step}", step, version, b"", "/c", 1), keep=2)
    assert rows(store, "SELECT name FROM checkpoints ORDER BY step") == [("c2",), ("c3",)]
    assert store.prune(0) == 4
    assert rows(store, "SELECT DISTINCT group_id FROM trajectories WHERE record IS NOT NULL ORDER BY 1") == [
        ("g00000002",),
        ("g00000003",),
    ]


def test_a_result_may_be_recorded_twice_but_not_changed(store: LedgerStore, make_trajectory: Maker) -> None:
    store.accept_group(record(make_trajectory, 0), step=0)
    store.plan_step(plan(0, ["g00000000.0.0"], ["g00000000.1.0"]))
    store.commit_step(result(0, {"first": 1.0}))
    store.commit_step(result(0, {"second": 2.0}))
    assert rows(store, "SELECT metrics FROM steps") == [('{"first": 1.0}',)]
    with pytest.raises(LedgerError, match="not planned"):
        store.commit_step(result(0, digest=b"x" * 32))


def test_versions_and_validations(store: LedgerStore) -> None:
    for received in (100, 0):  # a restarted server activates the version again
        store.add_version(VersionRecord(BASE, "127.0.0.1:1", b"d", received, 0.1, 0.2))
    for score in (0.0, 1.0):  # a validation that was not logged is played again
        store.add_validation([ValidationRecord("val", 0, "FrozenLake", index, index, score) for index in range(3)])
    assert rows(store, "SELECT step, target, received_bytes FROM versions") == [(0, "127.0.0.1:1", 0)]
    assert rows(store, "SELECT COUNT(*), SUM(score) FROM validations") == [(3, 3.0)]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot be used: unable to open database file; check free space"):
        LedgerStore(tmp_path / "missing" / "run.db")


_KILLED = """
import sys, time
from pathlib import Path
from rollwire.coordinator.ledger_schema import GroupRecord
from rollwire.coordinator.ledger_store import LedgerStore
from rollwire.v1 import trajectory_pb2

store = LedgerStore(Path(sys.argv[1]))
inserted = 0

def stop_at_the_third_trajectory(statement):
    global inserted
    inserted += statement.startswith("INSERT INTO trajectories")
    if inserted == 3:
        print("inside", flush=True)
        time.sleep(60)

def group(index):
    name = f"g{index:08d}"
    items = [trajectory_pb2.Trajectory(trajectory_id=f"{name}.{i}.0", group_id=name, episode_index=i) for i in range(8)]
    return GroupRecord(name, index, "FrozenLake", 1, 1, 1, items, [])

store.accept_group(group(0), 0)
store._connection.set_trace_callback(stop_at_the_third_trajectory)
store.accept_group(group(1), 0)
"""


def test_a_kill_in_the_middle_of_a_transaction_leaves_whole_groups_only(store: LedgerStore) -> None:
    """I2, I6: what was acknowledged is there, what was being written is not there at all."""
    child = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(store.path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "inside\n"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    reopened = LedgerStore(store.path)
    assert rows(reopened, "SELECT group_id, COUNT(*) FROM trajectories GROUP BY 1") == [("g00000000", 8)]
    assert rows(reopened, "SELECT group_id FROM groups") == [("g00000000",)]
    assert rows(reopened, "PRAGMA integrity_check") == [("ok",)]
    reopened.close()


async def test_the_writer_thread_keeps_order_and_a_cancelled_caller_tears_nothing(
    tmp_path: Path, make_trajectory: Maker
) -> None:
    ledger = await Ledger.create(tmp_path, RUN)
    tasks = [asyncio.create_task(ledger.accept_group(record(make_trajectory, index), 0)) for index in range(20)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError) and all(result is True for result in results[1:])
    await ledger.close()
    with sqlite3.connect(tmp_path / "run.db") as connection:
        counts = connection.execute(
            "SELECT group_index, COUNT(*) FROM groups JOIN trajectories USING (group_id) "
            "GROUP BY 1 ORDER BY groups.rowid"
        ).fetchall()
    assert counts in ([(index, 2) for index in range(20)], [(index, 2) for index in range(1, 20)])


def test_a_full_disk_is_named_and_what_was_acknowledged_stays(store: LedgerStore, make_trajectory: Maker) -> None:
    """I2; SQLite has rolled the transaction back by itself when it says so."""
    assert store.accept_group(record(make_trajectory, 0), 0)
    (pages,) = rows(store, "PRAGMA page_count")[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    large = record(make_trajectory, 1)
    large.trajectories[0].sequences[0].token_ids.extend(range(50_000))
    for _ in range(2):
        with pytest.raises(LedgerError, match=r"run\.db cannot be used: database or disk is full; check free space"):
            store.accept_group(large, 0)
    store._connection.execute(f"PRAGMA max_page_count = {pages + 1000}")
    assert store.accept_group(large, 0)
    assert rows(store, "SELECT group_id FROM groups ORDER BY 1") == [("g00000000",), ("g00000001",)]
