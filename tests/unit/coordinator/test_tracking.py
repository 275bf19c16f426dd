from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollwire.coordinator.errors import RunError
from rollwire.coordinator.tracking import Tracker


def test_scalars_and_texts_are_read_back_by_tensorboard(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "tb" / "name" / "20260101-000000", tmp_path)
    tracker.log_scalars(0, {"critic/score/mean": 0.25, "broken": float("nan")})
    tracker.log_scalars(1, {"critic/score/mean": 0.5})
    tracker.log_text(1, "episode/best", "**won** <b>")
    tracker.close()
    (path,) = (tmp_path / "tb" / "name").glob("*/events.out.tfevents.*")
    events = EventAccumulator(str(path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("critic/score/mean")] == [(0, 0.25), (1, 0.5)]
    assert events.Tags()["scalars"] == ["critic/score/mean"]
    (text,) = events.Tensors("episode/best")
    assert text.tensor_proto.string_val[0] == b"**won** <b>"
    assert events.summary_metadata["episode/best"].plugin_data.plugin_name == "text"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["critic/score/mean"]) for line in lines] == [(0, 0.25), (1, 0.5)]
    assert "broken" not in lines[0]


def test_values_are_on_disk_before_the_run_ends(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "tb", tmp_path)
    tracker.log_scalars(3, {"a": 1.0})
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert events.Scalars("a")[0].step == 3
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["a"] == 1.0
    tracker.close()


def test_a_run_that_logs_nothing_leaves_nothing(tmp_path: Path) -> None:
    Tracker(tmp_path / "tb", tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tracker = Tracker(tmp_path / "file" / "tb", tmp_path)
    with pytest.raises(RunError, match=r"metrics cannot be written to .*file/tb"):
        tracker.log_scalars(0, {"a": 1.0})


def test_a_full_disk_is_one_line_and_closing_adds_nothing_to_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = Tracker(tmp_path / "tb", tmp_path)
    with pytest.raises(RunError, match=r"metrics cannot be written to .*No space left on device"):
        tracker.log_scalars(0, {"a": 1.0})
    tracker.close()


def test_no_torch_and_no_tensorflow() -> None:
    code = (
        "import sys, pathlib, tempfile\n"
        "from rollwire.coordinator.tracking import Tracker\n"
        "import rollwire.coordinator.run\n"
        "d = pathlib.Path(tempfile.mkdtemp())\n"
        "t = Tracker(d / 'tb', d); t.log_scalars(0, {'a': 1.0}); t.log_text(0, 'b', 'c'); t.close()\n"
        "assert not {'torch', 'tensorflow', 'transformers'} & set(sys.modules), 'heavy import'\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)
