from __future__ import annotations

import io

from rich.console import Console

from rollwire.cli.progress import Progress, step_line, validation_line

STEP = {
    "critic/score/mean": 0.625,
    "env/FrozenLake/success": 0.5,
    "env/Sokoban/success": 0.7,
    "system/tps": 1834.4,
    "time/step_total": 3.94,
    "time/step_rollout": 2.7,
    "time/step_train": 1.0,
    "time/step_model_update": 0.14,
    "scheduler/group_filter_count": 0.0,
    "scheduler/failed": 0.0,
}
VALIDATION = {"val/score/mean": 0.4, "val/episodes": 512.0, "val/failed": 0.0, "val/env/FrozenLake/success": 0.42}


def test_a_step_is_one_line() -> None:
    line = step_line(4, 120, STEP)
    assert line == (
        "step   5/120  score  0.625  success 0.600  1,834 tok/s  3.9 s (rollout 2.7 + train 1.0 + weights 0.1)"
    )


def test_a_step_tells_what_is_unusual() -> None:
    line = step_line(0, 9, {**STEP, "scheduler/group_filter_count": 3.0, "scheduler/failed": 2.0})
    assert line.endswith("3 groups without signal  2 episodes failed so far")


def test_a_step_that_was_trained_again_was_not_played() -> None:
    known = {name: value for name, value in STEP.items() if name not in ("system/tps", "scheduler/failed")}
    assert "  success 0.600  trained again  3.9 s (" in step_line(4, 120, known)


def test_environments_without_success_have_a_score_alone() -> None:
    plain = {name: value for name, value in STEP.items() if not name.endswith("success")}
    assert "success" not in step_line(0, 9, plain)


def test_a_validation_is_one_line() -> None:
    assert validation_line(20, "val", VALIDATION) == (
        "validation after 20 steps  score 0.400  success 0.420  512 episodes"
    )
    greedy = {name.replace("val/", "val_greedy/"): value for name, value in VALIDATION.items()}
    assert validation_line(20, "val_greedy", {**greedy, "val_greedy/failed": 1.0}).endswith("512 episodes  1 failed")


def test_without_a_terminal_there_are_plain_lines_and_nothing_live() -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream, width=40), "lake", 120) as progress:
        progress.on_validation(0, "val", VALIDATION)
        progress.on_step(0, STEP)
        progress.on_notice("[red]a server[/red] was lost")
    assert stream.getvalue().splitlines() == [
        validation_line(0, "val", VALIDATION),
        step_line(0, 120, STEP),
        "[red]a server[/red] was lost",
    ]


def test_on_a_terminal_the_present_phase_is_shown() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with Progress(console, "lake", 120) as progress:
        progress.status.begin_phase("validating", 64)
        progress.status.count_episode()
        console.print(progress._now())
    assert "lake: validating" in stream.getvalue() and "1/64 episodes" in stream.getvalue()
