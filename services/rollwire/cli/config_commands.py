"""`rollwire config`: show, schema and import-roll."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rollwire.cli.arguments import split_arguments
from rollwire.serving.config import RunConfig, load_config
from rollwire.serving.config.loader import dump_config


def show(arguments: Sequence[str] | None) -> None:
    """Prints the resolved configuration. Raises `ConfigError`."""
    path, overrides = split_arguments(arguments)
    print(dump_config(load_config(path, overrides)), end="")


def schema() -> None:
    """Prints the JSON Schema."""
    print(json.dumps(RunConfig.model_json_schema(), indent=2))


def import_roll(path: Path) -> None:
    """Prints a ROLL file as a configuration, and on stderr what happened to its keys. Raises `ConfigError`."""
    from rollwire.cli.import_roll.convert import convert

    converted = convert(path)
    print(converted.yaml, end="")
    print(converted.report, file=sys.stderr)
