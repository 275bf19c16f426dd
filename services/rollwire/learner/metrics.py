"""Metrics of a training step: adding up over micro-batches, averaging over optimizer steps. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


def combine(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Adds the parts of one optimizer step; names that end in `_max` or `_min` take the extreme instead."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value
            elif name.endswith("_max"):
                total[name] = max(total[name], value)
            elif name.endswith("_min"):
                total[name] = min(total[name], value)
            else:
                total[name] += value
    return total


def average(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Averages over optimizer steps; `_max` and `_min` take the extreme. Names must agree in all steps."""
    listed = list(steps)
    total = combine(listed)
    return {name: value if name.endswith(("_max", "_min")) else value / len(listed) for name, value in total.items()}


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics without those that are not finite, which the contract does not allow."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
