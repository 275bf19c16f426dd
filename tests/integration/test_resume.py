"""`rollwire launch --resume`: a run whose coordinator or learner was killed goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollwire.v1 import trajectory_pb2

from .conftest import EXAMPLE, SMALL, Run, command, environment, finished_run, rollwire

STEPS = 4
SETTINGS = ("run.max_steps=4", "validation.every_steps=2")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished_run("launch", tmp_path_factory.mktemp("uninterrupted"), *SETTINGS)


def start(output_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    arguments = command("launch", EXAMPLE, *SMALL, *SETTINGS, f"run.output_dir={output_dir}", *overrides)
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    )


def run_dir_of(output_dir: Path) -> Path:
    (path,) = (output_dir / "runs" / "frozenlake-tiny").iterdir()
    return path


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"step {step}/"):
            return
    raise AssertionError(f"the run ended before step {step}: {process.stderr.read() if process.stderr else ''}")


def resumed(output_dir: Path) -> Run:
    path = run_dir_of(output_dir)
    done = rollwire("launch", "--resume", path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert run_dir_of(output_dir) == path
    return Run(done.stdout, path, output_dir)


def content(run: Run) -> list[tuple[str, list[int], list[float], float]]:
    rows = run.query("SELECT record FROM trajectories ORDER BY group_id, episode_index")
    records = [trajectory_pb2.Trajectory.FromString(blob) for (blob,) in rows]
    return [
        (record.trajectory_id, list(sequence.token_ids), list(sequence.logprobs), record.score)
        for record in records
        for sequence in record.sequences
    ]


def assert_equal(run: Run, other: Run) -> None:
    """I7: trajectories, weights of every version, validations, and the curves that people look at."""
    assert content(run) == content(other)
    digests = "SELECT DISTINCT step, digest FROM versions ORDER BY step"
    assert run.query(digests) == other.query(digests)
    exported = [(item.path / "export" / "final" / "model.safetensors").read_bytes() for item in (run, other)]
    assert exported[0] == exported[1]
    validations = "SELECT kind, step, environment_tag, start_index, score FROM validations ORDER BY 1, 2, 3, 4"
    assert run.query(validations) == other.query(validations)
    assert run.query("SELECT COUNT(DISTINCT lineage), COUNT(*) FROM steps") == [(1, STEPS)]
    for name in ("critic/score/mean", "actor/pg_loss", "system/samples", "val/score/mean"):
        assert curve(run, name) == curve(other, name), name


def curve(run: Run, name: str) -> list[tuple[int, float]]:
    (event_dir,) = (run.output_dir / "tensorboard" / "frozenlake-tiny").iterdir()
    events = EventAccumulator(str(event_dir), size_guidance={"scalars": 0})
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(name)]


def test_a_killed_coordinator(uninterrupted: Run, tmp_path: Path) -> None:
    """Only the checkpoint before the first step exists: two steps or three are trained again."""
    process = start(tmp_path)
    wait_for_step(process, 2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    run = resumed(tmp_path)
    assert_equal(run, uninterrupted)
    assert run.query("SELECT epoch, state FROM run") == [(2, "finished")]
    assert "were trained again" in run.stdout
    again = rollwire("launch", "--resume", run.path)
    assert again.returncode == 1
    assert "made all of its 4 steps, for which learner.optimizer.schedule=linear is laid out" in again.stderr
    status = rollwire("status", run.path)
    assert status.returncode == 0 and "finished, 4 steps committed" in status.stdout
    for directory in (run.path / "checkpoints").iterdir():
        assert str(directory) in status.stdout


def test_a_killed_colocated_run(uninterrupted: Run, tmp_path: Path) -> None:
    """Killed at any point of taking turns, it goes on; the servers are new, and awake."""
    process = start(tmp_path, "placement=colocated", "run.checkpoint_every_steps=1")
    wait_for_step(process, 2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    run = resumed(tmp_path)
    assert_equal(run, uninterrupted)
    assert "asleep" in (run.path / "logs" / "learner.log").read_text()


def test_a_killed_learner(uninterrupted: Run, tmp_path: Path) -> None:
    process = start(tmp_path, "run.checkpoint_every_steps=1")
    wait_for_step(process, 2)
    ready = json.loads((run_dir_of(tmp_path) / "learner.json").read_text())
    os.kill(ready["pid"], signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "the learner server was killed by SIGKILL" in errors
    assert f"resume with: rollwire launch --resume {run_dir_of(tmp_path)}" in errors
    run = resumed(tmp_path)
    assert_equal(run, uninterrupted)
    names = sorted(path.name[-10:] for path in (run.path / "checkpoints").iterdir())
    assert names == ["-000003-e2", "-000004-e2"]


def test_what_cannot_be_resumed_is_refused_in_one_line(uninterrupted: Run, tmp_path: Path) -> None:
    done = rollwire("launch", "--resume", tmp_path)
    assert done.returncode == 1 and "is no run directory: it has no run.db" in done.stderr
    for setting, expected in (
        ("learner.optimizer.learning_rate=1", "learner.optimizer.learning_rate is 1.0, but the run was started with"),
        ("learner.world_size=2", "run.deterministic=true: it would not go on bit for bit"),
    ):
        done = rollwire("launch", "--resume", uninterrupted.path, setting)
        assert done.returncode == 2 and expected in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_one_coordinator_at_a_time(tmp_path: Path) -> None:
    """I4."""
    process = start(tmp_path)
    try:
        wait_for_step(process, 1)
        done = rollwire("launch", "--resume", run_dir_of(tmp_path))
        assert done.returncode == 1 and "goes on in another process" in done.stderr
    finally:
        process.kill()
        process.communicate()
