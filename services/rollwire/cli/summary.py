"""The table at the end of a run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rollwire.coordinator.metrics import Metrics
from rollwire.coordinator.run import RunSummary
from rollwire.coordinator.run_dir import RunDir
from rollwire.coordinator.wording import counted


@dataclass(frozen=True)
class Curve:
    """One validation quantity over a run.

    Attributes:
        name: What is measured.
        first: Value at the first validation.
        best: Largest value.
        best_step: Steps done at the largest value; the first time it was reached.
        last: Value at the last validation.
    """

    name: str
    first: float
    best: float
    best_step: int
    last: float


def curves(validations: Sequence[tuple[int, str, Metrics]]) -> list[Curve]:
    """Returns how success, or the score where an environment reports no success, went for each tag.

    Args:
        validations: Steps done, kind and metrics of each validation, in order.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for step, kind, metrics in validations:
        tags = [name.split("/")[1] for name in metrics if name.startswith(f"{kind}/") and name.endswith("/score/mean")]
        for tag in (tag for tag in tags if tag != "score"):
            success = metrics.get(f"{kind}/env/{tag}/success")
            value = metrics[f"{kind}/{tag}/score/mean"] if success is None else success
            what = "score" if success is None else "success"
            greedy = "greedy " if kind == "val_greedy" else ""
            found.setdefault(f"{greedy}validation {what}, {tag}", []).append((step, value))
    result = []
    for name, values in found.items():
        best_step, best = max(values, key=lambda pair: (pair[1], -pair[0]))
        result.append(Curve(name, values[0][1], best, best_step, values[-1][1]))
    return result


def print_summary(console: Console, summary: RunSummary, run_dir: RunDir) -> None:
    """Prints how validation went, what the run took, and where everything is."""
    table = Table("", "first", "best", "last")
    for curve in curves(summary.totals.validations):
        table.add_row(
            curve.name, f"{curve.first:.3f}", f"{curve.best:.3f} (step {curve.best_step})", f"{curve.last:.3f}"
        )
    if table.row_count:
        console.print(table)
    totals = summary.totals
    lines = [
        f"{counted(summary.steps, 'step')}, {counted(totals.samples, 'episode')}, {counted(totals.tokens, 'token')} "
        f"in {summary.elapsed_s:.0f} s",
        *([f"stopped early  {summary.stop_cause}"] if summary.stop_cause is not None else []),
        *([f"not saved      {summary.unsaved}"] if summary.unsaved is not None else []),
        f"run directory  {run_dir.path}",
        f"policy         {summary.export_path}",
        f"curves         {_tensorboard()} --logdir {_shortest(run_dir.event_dir.parent)}",
    ]
    if totals.samples and not totals.trained:
        lines.insert(
            1,
            "nothing was trained: in every group all scores were equal, so no step had a signal. "
            "Can this model play this environment at all?",
        )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _tensorboard() -> str:
    """Returns how to start TensorBoard: by name if the shell finds it, else by the path next to this interpreter."""
    return "tensorboard" if shutil.which("tensorboard") else _shortest(Path(sys.executable).parent / "tensorboard")


def _shortest(path: Path) -> str:
    """Returns a path relative to the working directory when it lies below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
