"""`--dry-run`: the resolved configuration, what its numbers amount to, and what would be started."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from rollwire.coordinator.arithmetic import batch_arithmetic
from rollwire.coordinator.launcher import KINDS, child_command
from rollwire.serving.config import RunConfig
from rollwire.serving.config.loader import dump_config


def print_dry_run(console: Console, config: RunConfig, *, launch: bool) -> None:
    """Prints what a run would do.

    Args:
        console: Where to.
        config: The run.
        launch: True if the servers would be started, False if running ones would be used.
    """
    console.print(Syntax(dump_config(config), "yaml", background_color="default", word_wrap=True))
    table = Table("quantity", "value", title="Batch arithmetic", title_justify="left")
    for quantity, value in batch_arithmetic(config):
        table.add_row(quantity, value)
    console.print(table)
    if launch:
        place = Path(config.run.output_dir).absolute() / "runs" / config.run.name / "TIMESTAMP"
        lines = [shlex.join(child_command(kind, place)) for kind in KINDS]
        console.print("Processes that would be started, beside this one:")
    else:
        services = config.services.model_dump()
        lines = [f"{kind}: {', '.join(services[kind]) or 'no address'}" for kind in KINDS]
        console.print("Servers that would be used:")
    for line in lines:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
