"""What a resumed run reads from its ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollwire.coordinator.ledger_schema import CheckpointRecord, GroupRecord, Progress, RunRecord, StepPlan, StepResult
from rollwire.coordinator.ledger_store import LedgerStore
from rollwire.v1 import trajectory_pb2
from rollwire.v1.weights_pb2 import WeightVersion

Maker = Callable[..., trajectory_pb2.Trajectory]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LedgerStore]:
    store = LedgerStore(tmp_path / "run.db")
    store.create(RunRecord("run-1", "name", "old: {}", "2026-01-01T00:00:00+00:00", "/events", "/here"))
    yield store
    store.close()


def accept(store: LedgerStore, make: Maker, index: int) -> list[str]:
    group = f"g{index:08d}"
    items = [make(group, episode) for episode in range(2)]
    store.accept_group(GroupRecord(group, index, "FrozenLake", 1, 1, 1, items, []), step=index)
    return [item.trajectory_id for item in items]


def train(store: LedgerStore, step: int, ids: list[str], lineage: str = "line", base: int | None = None) -> None:
    before = WeightVersion(lineage=lineage, step=step if base is None else base)
    store.plan_step(StepPlan(step, before, b"b" * 32, ids, []))
    progress = Progress(samples=len(ids), kl_coefficient=0.5)
    store.commit_step(StepResult(step, lineage, before.step + 1, f"{lineage}{step}".encode(), {"m": 1.0}, progress))


def test_history_ends_with_a_planned_step_and_waiting_groups(store: LedgerStore, make_trajectory: Maker) -> None:
    ids = [accept(store, make_trajectory, index) for index in range(3)]
    train(store, 0, ids[0])
    store.plan_step(StepPlan(1, WeightVersion(lineage="line", step=1), b"p" * 32, ids[1], []))
    store.add_checkpoint(CheckpointRecord("c0", 0, WeightVersion(lineage="line"), b"d", "/c0", 7), keep=2)
    journal = store.resume("new: {}")
    assert (journal.run_id, journal.epoch, journal.committed) == ("run-1", 2, 1)
    first, planned = journal.steps
    assert first.after == WeightVersion(lineage="line", step=1) and first.weights_digest == b"line0"
    assert not planned.committed and planned.before == first.after and planned.after.step == 2
    assert journal.progress(1) == Progress(samples=2, kl_coefficient=0.5) and journal.progress(0) is None
    assert [record.name for record in journal.checkpoints] == ["c0"]
    assert journal.known_indices == {0, 1, 2} and journal.completed_episodes == 6
    (group,) = store.step_groups(planned)
    assert [item.trajectory_id for item in group] == ids[1]
    assert [(group.index, group.accepted_step) for group in store.waiting_groups()] == [(1, 1), (2, 2)]


def test_the_lineage_written_last_is_the_history(store: LedgerStore, make_trajectory: Maker) -> None:
    ids = [accept(store, make_trajectory, index) for index in range(3)]
    for step in range(3):
        train(store, step, ids[step])
    train(store, 1, ids[1], lineage="again", base=0)
    journal = store.resume("new: {}")
    assert [step.before.lineage for step in journal.steps] == ["line", "again", "line"]
    assert journal.steps[1].after == WeightVersion(lineage="again", step=1)


def test_a_step_whose_records_are_gone_has_no_groups(store: LedgerStore, make_trajectory: Maker) -> None:
    train(store, 0, accept(store, make_trajectory, 0))
    store.prune(0)
    journal = store.resume("new: {}")
    assert store.step_groups(journal.steps[0]) == []


def test_each_incarnation_has_the_next_epoch(store: LedgerStore) -> None:
    """I4."""
    assert [store.resume("new: {}").epoch for _ in range(3)] == [2, 3, 4]
