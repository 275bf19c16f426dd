from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from rollwire.coordinator.errors import RunError
from rollwire.coordinator.run_dir import RunDir, check_places, create_run_dir
from rollwire.serving.config import load_config
from rollwire.serving.server import ServeError

NOW = datetime.fromisoformat("2026-03-04T05:06:07+00:00")


def test_places(tmp_path: Path) -> None:
    config = load_config(None, [f"run.output_dir={tmp_path}", "run.name=lake"])
    run_dir = create_run_dir(config, NOW)
    assert run_dir.path == tmp_path / "runs" / "lake" / "20260304-050607"
    assert run_dir.event_dir == tmp_path / "tensorboard" / "lake" / "20260304-050607"
    assert sorted(item.name for item in run_dir.path.iterdir()) == ["config.yaml", "logs"]
    assert load_config(run_dir.config_file) == config, "what was resolved can be run again"
    assert not run_dir.event_dir.exists()


def test_log_dir_and_two_runs_in_one_second(tmp_path: Path) -> None:
    config = load_config(None, [f"run.output_dir={tmp_path}", f"tracking.log_dir={tmp_path}/elsewhere"])
    first, second = create_run_dir(config, NOW), create_run_dir(config, NOW)
    assert first.path != second.path
    assert second.path.name == "20260304-050607-2"
    assert second.event_dir == tmp_path / "elsewhere" / "rollwire" / "20260304-050607-2"


def test_a_place_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = load_config(None, [f"run.output_dir={tmp_path}/file"])
    with pytest.raises(RunError, match=r"run.output_dir is '.*/file', but .* cannot be written \(Not a directory\)"):
        create_run_dir(config, NOW)
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_places_are_tried_before_a_run_and_nothing_is_left_there(tmp_path: Path) -> None:
    check_places(load_config(None, [f"run.output_dir={tmp_path}/a/b", f"tracking.log_dir={tmp_path}/c"]), None)
    check_places(load_config(None), RunDir(tmp_path, tmp_path / "events", NOW))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for setting in ("run.output_dir", "tracking.log_dir"):
        config = load_config(None, [f"run.output_dir={tmp_path}", f"{setting}={tmp_path}/file/x"])
        with pytest.raises(ServeError, match=rf"{setting} is '.*/file/x', but .*/file cannot be written"):
            check_places(config, None)
    with pytest.raises(ServeError, match=r"the directory of its event file is '.*/file/x', but"):
        check_places(load_config(None), RunDir(tmp_path, tmp_path / "file" / "x", NOW))
