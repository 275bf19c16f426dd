"""Arguments that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

RunArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG [KEY=VALUE]...",
        help="YAML file, then settings that override it, such as run.max_steps=10. Without a file a run is resumed.",
        show_default=False,
    ),
]
ServeArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="YAML file of the run, then settings that override it. Without a file all defaults apply.",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="RUN_DIR",
        help="Go on with the run in this directory, under its stored configuration.",
        show_default=False,
    ),
]
Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="Run directory, or HOST:PORT of the coordinator.", show_default=False)
]


def split_arguments(arguments: Sequence[str] | None) -> tuple[Path | None, list[str]]:
    """Separates the configuration file from overrides: it is the first argument if that holds no `=`."""
    items = list(arguments or ())
    if items and "=" not in items[0]:
        return Path(items[0]), items[1:]
    return None, items


def split_run_arguments(arguments: Sequence[str] | None) -> tuple[Path, list[str]]:
    """Like `split_arguments`, for commands that need a file.

    Raises:
        ConfigError: There is none.
    """
    from rollwire.serving.config import ConfigError

    path, overrides = split_arguments(arguments)
    if path is None:
        raise ConfigError("CONFIG is missing; give a YAML file such as deploy/configs/frozenlake-tiny.yaml")
    return path, overrides
