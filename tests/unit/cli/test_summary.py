from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from rollwire.cli.summary import Curve, curves, print_summary
from rollwire.coordinator.journaled import Totals
from rollwire.coordinator.run import RunSummary
from rollwire.coordinator.run_dir import RunDir


def validation(step: int, success: float, kind: str = "val") -> tuple[int, str, dict[str, float]]:
    metrics = {
        f"{kind}/score/mean": 9.0,
        f"{kind}/FrozenLake/score/mean": 8.0,
        f"{kind}/env/FrozenLake/success": success,
        f"{kind}/Chess/score/mean": -success,
    }
    return step, kind, metrics


def test_success_per_tag_or_the_score_where_there_is_none() -> None:
    found = curves([validation(0, 0.25), validation(10, 0.75), validation(20, 0.5), validation(20, 0.9, "val_greedy")])
    assert found == [
        Curve("validation success, FrozenLake", 0.25, 0.75, 10, 0.5),
        Curve("validation score, Chess", -0.25, -0.25, 0, -0.5),
        Curve("greedy validation success, FrozenLake", 0.9, 0.9, 20, 0.9),
        Curve("greedy validation score, Chess", -0.9, -0.9, 20, -0.9),
    ]


def test_the_first_of_equal_bests_counts() -> None:
    assert curves([validation(0, 1.0), validation(5, 1.0)])[0].best_step == 0


def text_of(summary: RunSummary) -> str:
    stream = io.StringIO()
    run_dir = RunDir(Path("/out/runs/lake/now"), Path("/out/tensorboard/lake/now"), datetime.now(UTC))
    print_summary(Console(file=stream, width=120), summary, run_dir)
    return stream.getvalue()


def test_the_summary_says_what_and_where() -> None:
    totals = Totals(samples=1280, trained=640, tokens=654321, validations=[validation(0, 0.25), validation(10, 0.75)])
    text = text_of(RunSummary(totals, 10, 61.4, "/out/runs/lake/now/export/final", None))
    for part in (
        "0.250",
        "0.750 (step 10)",
        "10 steps, 1,280 episodes, 654,321 tokens in 61 s",
        "run directory  /out/runs/lake/now\n",
        "/out/runs/lake/now/export/final",
        "tensorboard --logdir /out/tensorboard/lake\n",  # with or without a directory in front
    ):
        assert part in text
    assert "stopped" not in text
    assert "nothing was trained" not in text


def test_a_run_without_any_signal_says_so() -> None:
    totals = Totals(samples=32, tokens=100, validations=[validation(0, 0.0)])
    assert "nothing was trained: in every group all scores were equal" in text_of(
        RunSummary(totals, 2, 3.0, "/e", None)
    )


def test_a_run_whose_end_is_not_saved_says_so() -> None:
    text = text_of(RunSummary(Totals(), 1, 1.0, "/x", None, "there is no checkpoint after 1 step: No space left"))
    assert "\n".join(text.splitlines()[:2]) == (
        "1 step, 0 episodes, 0 tokens in 1 s\nnot saved      there is no checkpoint after 1 step: No space left"
    )


def test_a_run_that_was_stopped_says_so() -> None:
    assert "stopped early  enough" in text_of(RunSummary(Totals(), 3, 1.0, "/x", "enough"))
