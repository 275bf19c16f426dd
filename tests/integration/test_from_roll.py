"""ROLL's quick start, converted, runs on this machine and leaves what its documentation looks for."""

from __future__ import annotations

from pathlib import Path

from roll_files import QUICK_START
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from .conftest import rollwire


def test_the_quick_start_of_roll_converts_and_runs(tmp_path: Path) -> None:
    converted = rollwire("config", "import-roll", QUICK_START)
    assert converted.returncode == 0, converted.stderr
    assert "adv_estimator: " in converted.stderr and "num_gpus_per_node: " in converted.stderr
    (tmp_path / "run.yaml").write_text(converted.stdout)

    done = rollwire("launch", "run.yaml", "model.path=builtin:tiny", "device=cpu", cwd=tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    (events,) = (tmp_path / "output" / "tensorboard" / "roll-quick-start-npu").glob("*/events.out.tfevents.*")
    metrics = EventAccumulator(str(events))
    metrics.Reload()
    assert len(metrics.Scalars("time/step_total")) == 1
    assert [point.value for point in metrics.Scalars("system/samples")] == [8.0]
    assert -0.1 <= metrics.Scalars("critic/score/mean")[-1].value <= 1.0
    assert metrics.Scalars("actor/backward_steps")[-1].value == 4.0
    assert len(metrics.Scalars("val/score/mean")) == 2
