"""Taking turns changes no result: real servers on CPU, where sleeping frees nothing but everything else is the same."""

from __future__ import annotations

from pathlib import Path

from .conftest import finished_run

QUERY = "SELECT step, digest, hex(weights_digest) FROM steps ORDER BY step"


def test_a_colocated_run_is_bit_for_bit_the_separate_one(tmp_path: Path) -> None:
    runs = {
        placement: finished_run(
            "launch", tmp_path / placement, f"placement={placement}", "run.max_steps=2", "run.checkpoint_every_steps=1"
        )
        for placement in ("separate", "colocated")
    }
    steps = {placement: run.query(QUERY) for placement, run in runs.items()}
    assert len(steps["separate"]) == 2
    assert steps["colocated"] == steps["separate"]
    logs = "".join(file.read_text() for file in runs["colocated"].path.rglob("*.log"))
    assert logs.count("asleep") >= 4 and logs.count("awake") >= 4
