"""One run of deploy/configs/mixed-tiny.yaml, made small: four environments, each with curves of its own."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from rollwire.v1 import trajectory_pb2

from .conftest import ROOT, Run, rollwire

CONFIG = ROOT / "deploy" / "configs" / "mixed-tiny.yaml"
SMALL = (
    "run.max_steps=2",
    "batch.groups_per_step=8",
    "batch.episodes_per_group=2",
    "validation.episodes=4",
    "validation.every_steps=1",
    "max_staleness=0",
)
# gem-llm cannot be installed on later versions of Python; there another type stands behind the same tag.
WITHOUT_GEM = "environment.definitions.GuessNumber={type: reasoning_gym, options: {dataset: leg_counting}}"
OF_GAMES = {"action_is_effective", "action_is_valid", "format_penalty", "num_actions", "success"}
METRICS = {
    "FrozenLake": OF_GAMES,
    "SimpleSokoban": OF_GAMES,
    "GuessNumber": {"num_actions", "success"},
    "ChainSum": {"action_is_valid", "format_penalty", "num_actions", "score", "success"},
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    output = tmp_path_factory.mktemp("mixed")
    changes = () if sys.version_info[:3] <= (3, 12, 0) else (WITHOUT_GEM,)
    done = rollwire("launch", CONFIG, *SMALL, *changes, f"run.output_dir={output}")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (path,) = (output / "runs" / "mixed-tiny").iterdir()
    return Run(done.stdout, path, output)


def logged(run: Run) -> dict[str, float]:
    lines = (Path(run.path) / "metrics.jsonl").read_text().splitlines()
    return {name: value for line in lines for name, value in json.loads(line).items()}


def test_each_environment_has_its_metrics_in_training_and_in_validation(mixed: Run) -> None:
    found = logged(mixed)
    for tag, names in METRICS.items():
        assert {f"env/{tag}/{name}" for name in names} <= found.keys()
        assert {f"val/env/{tag}/{name}" for name in names} <= found.keys()
        assert f"val/{tag}/score/mean" in found


def test_groups_are_shared_out_by_weight_and_every_episode_is_there(mixed: Run) -> None:
    records = [trajectory_pb2.Trajectory.FromString(blob) for (blob,) in mixed.query("SELECT record FROM trajectories")]
    groups = {record.group_id: record.environment_tag for record in records}
    shares = Counter(groups.values())
    assert shares["FrozenLake"] == 2 * shares["SimpleSokoban"] == 4 * shares["GuessNumber"] == 4 * shares["ChainSum"]
    assert set(Counter(record.group_id for record in records).values()) == {2}
    found = logged(mixed)
    assert (found["val/episodes"], found["val/failed"], found["scheduler/failed"]) == (16.0, 0.0, 0.0)
