"""`rollwire config`: show and schema."""

from __future__ import annotations

import json
from collections.abc import Sequence

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
