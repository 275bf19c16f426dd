"""What a person sees while a run goes on: a line per step and validation, and on a terminal what happens right now."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rollwire.coordinator.status import RunStatus
from rollwire.coordinator.wording import counted

_PHASES: Final = (("rollout", "step_rollout"), ("train", "step_train"), ("weights", "step_model_update"))
_REFRESH_PER_S: Final = 4


def mean_of(metrics: Mapping[str, float], prefix: str, name: str) -> float | None:
    """Returns the mean over tags of `<prefix>/<Tag>/<name>`; None when no tag has it."""
    found = [value for key, value in metrics.items() if key.startswith(f"{prefix}/") and key.endswith(f"/{name}")]
    return sum(found) / len(found) if found else None


def step_line(step: int, max_steps: int, metrics: Mapping[str, float]) -> str:
    """Returns one line about a training step.

    Args:
        step: Number of the step, from 0.
        max_steps: Steps of the run.
        metrics: Its scalars; without those of playing when a resumed run trained it again.
    """
    parts = [f"step {step + 1:>{len(str(max_steps))}}/{max_steps}"]
    parts.append(f"score {metrics['critic/score/mean']:6.3f}")
    success = mean_of(metrics, "env", "success")
    if success is not None:
        parts.append(f"success {success:5.3f}")
    played = "system/tps" in metrics
    parts.append(f"{metrics['system/tps']:,.0f} tok/s" if played else "trained again")
    phases = " + ".join(f"{name} {metrics.get(f'time/{key}', 0.0):.1f}" for name, key in _PHASES)
    parts.append(f"{metrics['time/step_total']:.1f} s ({phases})")
    if metrics["scheduler/group_filter_count"]:
        parts.append(f"{counted(metrics['scheduler/group_filter_count'], 'group')} without signal")
    if metrics.get("scheduler/failed"):
        parts.append(f"{counted(metrics['scheduler/failed'], 'episode')} failed so far")
    return "  ".join(parts)


def validation_line(step: int, kind: str, metrics: Mapping[str, float]) -> str:
    """Returns one line about a validation after `step` training steps."""
    name = "validation" if kind == "val" else "greedy validation"
    parts = [f"{name} after {counted(step, 'step')}"]
    parts.append(f"score {metrics[f'{kind}/score/mean']:.3f}")
    success = mean_of(metrics, f"{kind}/env", "success")
    if success is not None:
        parts.append(f"success {success:.3f}")
    parts.append(counted(metrics[f"{kind}/episodes"], "episode"))
    if metrics[f"{kind}/failed"]:
        parts.append(f"{metrics[f'{kind}/failed']:.0f} failed")
    return "  ".join(parts)


class Progress:
    """Observes a run; use as a context manager around it.

    Args:
        console: Where lines go; a live line is added when it is a terminal.
        run_name: Name of the run.
        max_steps: Steps of the run.
    """

    def __init__(self, console: Console, run_name: str, max_steps: int) -> None:
        self.status = RunStatus(run_name=run_name, max_steps=max_steps, observer=self)
        self._console = console
        self._live = (
            Live(
                console=console,
                get_renderable=self._now,
                refresh_per_second=_REFRESH_PER_S,
                transient=True,
            )
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints a line."""
        self._print(step_line(step, self.status.max_steps, metrics))

    def on_validation(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        """Prints a line."""
        self._print(validation_line(step, kind, metrics), style="bold")

    def on_notice(self, text: str) -> None:
        """Prints a line."""
        self._print(text, style="yellow")

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _now(self) -> Table:
        """Draws the phase in progress and how far it is."""
        status = self.status
        grid = Table.grid(padding=(0, 1))
        bar: ProgressBar | str = ""
        done = ""
        if status.episodes_total:
            shown = min(status.episodes_done, status.episodes_total)
            bar = ProgressBar(total=status.episodes_total, completed=shown, width=30)
            done = f"{shown}/{status.episodes_total} episodes"
        text = f"{status.run_name}: {status.phase}"
        grid.add_row(Spinner("dots", text=text), bar, done, f"{status.elapsed_s:.0f} s")
        return grid
