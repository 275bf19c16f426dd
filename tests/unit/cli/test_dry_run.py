"""What `--dry-run` says about processes and places."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from rollwire.cli.dry_run import print_dry_run, processes
from rollwire.cli.resume import ResumedRun
from rollwire.coordinator.run_dir import RunDir
from rollwire.serving.config import load_config


def test_ranks_are_processes_too() -> None:
    assert processes(load_config(None)) == "environment, learner, rollout: one process each"
    assert (
        processes(load_config(None, ["learner.world_size=2"]))
        == "environment, learner with 2 ranks, rollout: one process each, one for each rank"
    )


def test_a_run_that_would_go_on_is_named_with_its_steps() -> None:
    config = load_config(None, ["run.max_steps=6"])
    place = RunDir(Path("/out/runs/lake/then"), Path("/out/tensorboard/lake/then"), datetime.now(UTC))
    stream = io.StringIO()
    print_dry_run(
        Console(file=stream), config, launch=True, resumed=ResumedRun(place, config, config, exact=True, steps=1)
    )
    text = stream.getvalue()
    assert "Would go on in /out/runs/lake/then: 1 step of 6 done, 5 to go." in text
    assert "serve learner /out/runs/lake/then/config.yaml run.output_dir=/out/runs/lake/then" in text
    assert "TIMESTAMP" not in text
