"""The examples of docs/agents.md against real processes: a pusher, and an agent with the `openai` package."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollwire.v1 import trajectory_pb2

from .conftest import ROOT, Run, command, environment

STEPS, GROUPS, EPISODES = 3, 3, 4
LIMIT_S = 300
SMALL = (
    f"run.max_steps={STEPS}",
    f"batch.groups_per_step={GROUPS}",
    f"batch.episodes_per_group={EPISODES}",
    "validation.episodes=4",
    "validation.every_steps=0",
    "validation.greedy_at_end=false",
    "learner.optimizer_steps_per_batch=1",
    "run.checkpoint_every_steps=0",
    "algorithm.filter_zero_variance=false",  # so that a step is trained whatever scores chance gives its few groups
)


def train_from_outside(name: str, output_dir: Path, example: str, *arguments: str) -> tuple[Run, str]:
    """Runs a configuration and the program that plays for it, both to their ends."""
    config = ROOT / "deploy" / "configs" / f"{name}.yaml"
    launch = subprocess.Popen(
        command("launch", config, *SMALL, f"run.output_dir={output_dir}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    player: subprocess.Popen[str] | None = None
    try:
        address = wait_for_address(output_dir / "runs" / name, launch)
        player = subprocess.Popen(
            [sys.executable, str(ROOT / "docs" / "examples" / example), address, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )
        said, _ = player.communicate(timeout=LIMIT_S)
        printed, _ = launch.communicate(timeout=LIMIT_S)
    finally:
        for process in (launch, player):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait(60)
    assert launch.returncode == 0, f"{printed}\n{said}"
    assert player.returncode == 0, said
    (path,) = (output_dir / "runs" / name).iterdir()
    return Run(printed, path, output_dir), said


def wait_for_address(runs: Path, launch: subprocess.Popen[str]) -> str:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and launch.poll() is None:
        for found in runs.glob("*/coordinator.json"):
            return str(json.loads(found.read_text())["address"])
        time.sleep(0.05)
    pytest.fail(f"the run names no address: {launch.communicate()[0] if launch.poll() is not None else 'too slow'}")


def check_training(run: Run, tag: str) -> list[trajectory_pb2.Trajectory]:
    """Checks that each step trained complete groups of the tag, and returns all trajectories."""
    assert "the coordinator listens on 127.0.0.1:" in run.stdout
    assert run.query("SELECT COUNT(*) FROM steps WHERE state = 'committed' AND version_after = step + 1") == [(STEPS,)]
    trained = run.query("SELECT COUNT(*), COUNT(DISTINCT trajectory_id) FROM step_trajectories")
    assert trained == [(STEPS * GROUPS * EPISODES,) * 2]
    assert run.query("SELECT DISTINCT environment_tag FROM groups") == [(tag,)]
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "scheduler/requested" in line]
    for line in steps:
        counted = line["scheduler/completed"] + line["scheduler/failed"] + line["scheduler/in_flight"]
        assert line["scheduler/requested"] == counted
    assert f"env/{tag}/success" in steps[-1] and "val/FrozenLake/score/mean" in lines[-1]
    # What the program said about its tokens is what the learner computes: prompts, masks and log-probabilities fit.
    gaps = [line["actor/logprob_gap_max"] for line in steps if "actor/logprob_gap_max" in line]
    assert gaps and max(gaps) < 1e-3
    records = run.query("SELECT record FROM trajectories")
    return [trajectory_pb2.Trajectory.FromString(record) for (record,) in records]


def test_a_pusher(tmp_path: Path) -> None:
    run, said = train_from_outside("frozenlake-pushed", tmp_path, "frozenlake_pusher.py")
    assert "the run has ended; {'ACCEPTED':" in said
    trajectories = check_training(run, "FrozenLakePushed")
    assert {len(trajectory.sequences) for trajectory in trajectories} == {1}
    assert any(len(trajectory.turns) > 1 for trajectory in trajectories)


def test_an_agent_with_the_openai_package(tmp_path: Path) -> None:
    run, said = train_from_outside("frozenlake-agent", tmp_path, "frozenlake_agent.py", "--agents", "6")
    assert "the run has ended;" in said
    trajectories = check_training(run, "FrozenLakeAgent")
    assert {len(trajectory.sequences) for trajectory in trajectories} == {1}, "each prompt extends the tokens before"
    assert any(len(trajectory.turns) > 1 for trajectory in trajectories)
