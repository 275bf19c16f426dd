"""`--dry-run`: the resolved configuration, what its numbers amount to, and what would be started."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from rollwire.cli.resume import ResumedRun
from rollwire.coordinator.arithmetic import batch_arithmetic
from rollwire.coordinator.launcher import KINDS, child_command
from rollwire.coordinator.wording import counted
from rollwire.serving.config import RunConfig
from rollwire.serving.config.loader import dump_config


def processes(config: RunConfig) -> str:
    """Returns which processes a launched run starts."""
    ranks = config.learner.world_size
    names = [f"{kind} with {ranks} ranks" if kind == "learner" and ranks > 1 else kind for kind in KINDS]
    return f"{', '.join(names)}: one process each{'' if ranks == 1 else ', one for each rank'}"


def print_dry_run(console: Console, config: RunConfig, *, launch: bool, resumed: ResumedRun | None = None) -> None:
    """Prints what a run would do.

    Args:
        console: Where to.
        config: The run.
        launch: True if the servers would be started, False if running ones would be used.
        resumed: The run that would go on; None for a new one.
    """
    console.print(Syntax(dump_config(config), "yaml", background_color="default", word_wrap=True))
    table = Table("quantity", "value", title="Batch arithmetic", title_justify="left")
    for quantity, value in batch_arithmetic(config):
        table.add_row(quantity, value)
    console.print(table)
    if resumed is not None:
        place = resumed.run_dir.path
        done, left = counted(resumed.steps, "step"), config.run.max_steps - resumed.steps
        _print(console, f"Would go on in {place}: {done} of {config.run.max_steps} done, {left} to go.")
    else:
        place = Path(config.run.output_dir).absolute() / "runs" / config.run.name / "TIMESTAMP"
    if launch:
        lines = [shlex.join(child_command(kind, place)) for kind in KINDS]
        _print(console, f"Would start, beside this process: {processes(config)}")
    else:
        services = config.services.model_dump()
        lines = [f"{kind}: {', '.join(services[kind]) or 'no address'}" for kind in KINDS]
        console.print("Servers that would be used:")
    for line in lines:
        _print(console, f"  {line}")


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
