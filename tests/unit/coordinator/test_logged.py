"""Curves that go on in another event file: every step once, whatever was written when the process died."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollwire.coordinator.errors import RunError
from rollwire.coordinator.logged import read_logged
from rollwire.coordinator.tracking import METRICS_FILE, Tracker


def step(number: int) -> dict[str, float]:
    return {"system/samples": 1.0, "a": float(number)}


def test_a_curve_goes_on_without_a_gap_or_a_double(tmp_path: Path) -> None:
    first = Tracker(tmp_path / "tb", tmp_path)
    first.log_scalars(0, {"val/score/mean": 0.5})
    for number in range(2):
        first.log_scalars(number, step(number))
    first.log_scalars(2, {"val/score/mean": 0.7})
    first.log_scalars(2, step(2))
    first.close()
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-9])  # the event of step 2 was written, its line only in part
    logged = read_logged(path)
    assert logged.steps == 2 and [(at, kind) for at, kind, _ in logged.validations] == [(0, "val"), (2, "val")]
    second = Tracker(tmp_path / "tb", tmp_path)
    second.go_on(logged)
    for number in range(2, 4):
        second.log_scalars(number, step(number) | {"a": -1.0})
    second.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(0, 0.0), (1, 1.0), (2, -1.0), (3, -1.0)]
    assert [(event.step, round(event.value, 1)) for event in events.Scalars("val/score/mean")] == [(0, 0.5), (2, 0.7)]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines if "a" in line] == [0, 1, 2, 3]


def test_nothing_was_logged(tmp_path: Path) -> None:
    assert read_logged(tmp_path / METRICS_FILE).steps == 0


@pytest.mark.parametrize(
    "line", ["hello", "[1, 2]", "3", '{"time": 1.0}', '{"step": "x", "time": 1, "system/samples": 2}']
)
def test_a_file_that_was_edited_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / METRICS_FILE).write_text(f"{line}\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl cannot be read"):
        read_logged(tmp_path / METRICS_FILE)
