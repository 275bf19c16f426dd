"""Runs the real processes, as a user would start them."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "deploy" / "configs" / "frozenlake-tiny.yaml"
SMALL = (
    "run.max_steps=3",
    "batch.groups_per_step=4",
    "batch.episodes_per_group=4",
    "validation.episodes=8",
    "validation.every_steps=0",
    "learner.optimizer_steps_per_batch=2",
    "run.deterministic=true",
    "max_staleness=0",
)


def environment() -> dict[str, str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "rollwire.cli.main", *map(str, arguments)]


def rollwire(*arguments: object, timeout_s: float = 240, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=timeout_s, env=environment(), check=False, cwd=cwd
    )


@dataclass(frozen=True)
class Run:
    """A finished run: what it printed and where its files are."""

    stdout: str
    path: Path
    output_dir: Path

    def query(self, sql: str) -> list[tuple]:
        with sqlite3.connect(self.path / "run.db") as ledger:
            return ledger.execute(sql).fetchall()


def finished_run(verb: str, output_dir: Path, *overrides: object) -> Run:
    """Runs `rollwire launch|train` on the example, made small, to its end."""
    done = rollwire(verb, EXAMPLE, *SMALL, f"run.output_dir={output_dir}", *overrides)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (path,) = max((output_dir / "runs").iterdir(), key=lambda entry: entry.stat().st_mtime_ns).iterdir()
    return Run(done.stdout, path, output_dir)


@pytest.fixture(scope="session")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished_run("launch", tmp_path_factory.mktemp("launched"))


@pytest.fixture
def launch_again(tmp_path: Path) -> Callable[..., Run]:
    return lambda *overrides: finished_run("launch", tmp_path / "again", *overrides)
