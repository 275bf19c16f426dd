"""What `rollwire status` says about a run whose coordinator is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollwire.cli.status import read_ended_run, status_command
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.ledger_schema import CheckpointRecord, Progress, RunRecord, StepPlan, StepResult
from rollwire.coordinator.ledger_store import LedgerStore
from rollwire.v1.weights_pb2 import WeightVersion


def plan(store: LedgerStore, step: int, lineage: str = "line") -> None:
    store.plan_step(StepPlan(step, WeightVersion(lineage=lineage, step=step), b"b" * 32, [], []))


def train(store: LedgerStore, step: int, lineage: str = "line") -> None:
    plan(store, step, lineage)
    store.commit_step(StepResult(step, lineage, step + 1, b"w", {}, Progress()))


@pytest.fixture
def store(tmp_path: Path) -> LedgerStore:
    store = LedgerStore(tmp_path / "run.db")
    store.create(RunRecord("run-1", "name", "{}", "2026-01-01T00:00:00+00:00", "/events", "/here"))
    (tmp_path / "config.yaml").write_text("{}\n")
    return store


def printed(store: LedgerStore, directory: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    store.close()
    status_command(str(directory), as_json=False)
    return capsys.readouterr().out.splitlines()


def test_steps_that_were_trained_in_two_lineages_count_once(
    store: LedgerStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step, lineage in [*((step, "line") for step in range(4)), *((step, "other") for step in range(5))]:
        train(store, step, lineage)
    store.set_state("finished")
    assert printed(store, tmp_path, capsys) == ["run-1: finished, 5 steps committed"]


def test_what_is_to_be_trained_again_is_not_done(store: LedgerStore, tmp_path: Path) -> None:
    for step in range(3):
        train(store, step)
    plan(store, 1, "other")
    store.close()
    ended = read_ended_run(tmp_path)
    assert ended is not None and (ended.steps, ended.planned) == (1, 2)


def test_an_interrupted_run_says_how_to_go_on_and_cuts_no_path(
    store: LedgerStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(store, 0)
    plan(store, 1)
    store.set_state("running")
    version = WeightVersion(lineage="line")
    long = f"/checkpoints/{'c' * 100}"
    store.add_checkpoint(CheckpointRecord("c0", 0, version, b"d", long, 7 << 20), keep=2)
    store.add_checkpoint(CheckpointRecord("c1", 1, version, b"d", "/c1", 15 << 20), keep=2)
    assert printed(store, tmp_path, capsys) == [
        "run-1: interrupted, 1 step committed, 1 more step begun",
        f"checkpoint after 0 steps   7.0 MiB  {long}",
        "checkpoint after 1 step   15.0 MiB  /c1",
        f"resume with: rollwire launch --resume {tmp_path}",
    ]


def test_a_run_with_servers_of_others_is_resumed_with_train(
    store: LedgerStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("services: {learner: ['127.0.0.1:5']}\n")
    store.set_state("stopped")
    assert printed(store, tmp_path, capsys)[-1] == f"resume with: rollwire train --resume {tmp_path}"


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is no run directory: it has no config\.yaml"):
        status_command(str(tmp_path), as_json=False)
