"""ROLL configurations for tests: the fixtures, and variants of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rollwire.cli.import_roll.convert import Converted, convert

FIXTURES = Path(__file__).resolve().parents[1] / "unit" / "cli" / "import_roll" / "roll"
QUICK_START = FIXTURES / "quick_start.yaml"
FILES = sorted(path for path in FIXTURES.glob("*.yaml") if path.stem != "frozen_lake")
"""All but the part that the others include."""


def variant(
    directory: Path, changes: Mapping[str, Any], base: str = "quick_start", without: tuple[str, ...] = ()
) -> Path:
    """Writes a fixture with changed keys and returns the file.

    Args:
        directory: Where to.
        changes: Values by dotted path.
        base: Fixture that is changed.
        without: Dotted paths that are removed.
    """
    content = yaml.safe_load((FIXTURES / f"{base}.yaml").read_text())
    for key, value in changes.items():
        *parents, last = key.split(".")
        inner = content
        for part in parents:
            inner = inner.setdefault(part, {})
        inner[last] = value
    for key in without:
        *parents, last = key.split(".")
        inner = content
        for part in parents:
            inner = inner[part]
        del inner[last]
    included = FIXTURES / "frozen_lake.yaml"
    (directory / included.name).write_text(included.read_text())
    path = directory / "variant.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def converted(
    directory: Path, changes: Mapping[str, Any], base: str = "quick_start", without: tuple[str, ...] = ()
) -> Converted:
    """Converts a variant."""
    return convert(variant(directory, changes, base, without))


def setting(result: Converted, key: str) -> Any:
    """Returns a setting by its dotted path; None if there is none."""
    value: Any = yaml.safe_load(result.yaml)
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def told(result: Converted, key: str) -> str:
    """Returns what the report says about a key: its heading and why; empty if nothing."""
    heading = ""
    for line in result.report.splitlines():
        if line.startswith(f"  {key}: "):
            return f"{heading.partition(':')[0]}: {line.partition(': ')[2]}"
        if line and not line.startswith(" "):
            heading = line
    return ""


def general(key: str) -> str:
    """Returns a key with what differs from file to file replaced."""
    key = re.sub(r"^(custom_envs|environment\.definitions)\.[^.]+", r"\1.<Tag>", key)
    return re.sub(r"filters\.\d+", "filters[]", key)
