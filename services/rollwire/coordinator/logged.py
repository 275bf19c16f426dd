"""What an earlier incarnation of a run has logged, read from its `metrics.jsonl`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rollwire.coordinator.errors import RunError
from rollwire.coordinator.metrics import Metrics

STEP_MARK: Final = "system/samples"
"""Scalar that a line about a training step has, and no other line."""

_KINDS: Final = ("val_greedy", "val")


@dataclass
class Logged:
    """Lines of `metrics.jsonl`.

    Attributes:
        steps: Training steps that are logged: 0 to this minus 1.
        validations: Steps done, kind and metrics of each validation, in order.
        later: Validations that stand at `steps` or later: where event files are purged they are to be written again.
    """

    steps: int = 0
    validations: list[tuple[int, str, Metrics]] = field(default_factory=list)
    later: list[tuple[int, Metrics]] = field(default_factory=list)


def read_logged(path: Path) -> Logged:
    """Reads the file, after removing what was written of a last line when the process died.

    Raises:
        RunError: It cannot be read or mended.
    """
    lines: list[tuple[int, Metrics]] = []
    try:
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        for line in whole.splitlines():
            parsed: dict[str, Any] = json.loads(line)
            step = int(parsed.pop("step"))
            parsed.pop("time")
            lines.append((step, parsed))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} cannot be read ({error}); mend it or move it away") from error
    logged = Logged(steps=max((step + 1 for step, metrics in lines if STEP_MARK in metrics), default=0))
    for step, metrics in lines:
        kind = next((kind for kind in _KINDS if f"{kind}/score/mean" in metrics), None)
        if kind is not None:
            logged.validations.append((step, kind, metrics))
            if step >= logged.steps:
                logged.later.append((step, metrics))
    return logged
