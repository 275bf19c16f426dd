"""What vLLM's ranks report about a load, judged. Pure: imports no vLLM and no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rollwire.rollout.host_file import FileEntry

_SHOWN: Final = 3


class WeightsNotHeldError(Exception):
    """The engine does not hold what it was sent; the text is one line."""


def wire_entries(entries: Sequence[FileEntry]) -> list[list[Any]]:
    """Returns entries in types that survive vLLM's messages to its workers."""
    return [[entry.name, int(entry.dtype), list(entry.shape), entry.offset, entry.size_bytes] for entry in entries]


def check_reports(entries: Sequence[FileEntry], reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Checks that all ranks together hold every tensor bit for bit and that no parameter kept an old value.

    Args:
        entries: What was sent.
        reports: What `RolloutWorker.rl_load` returned on each rank.

    Returns:
        Names of the tensors that cannot be compared, because the model's loader computes with them.

    Raises:
        WeightsNotHeldError: Something is missing, differs or is stale.
    """
    differing = sorted({name for report in reports for name in report["differing"]})
    stale = sorted({name for report in reports for name in report["stale"]})
    transformed = {name for report in reports for name in report["transformed"]}
    incomplete = [
        entry.name
        for entry in entries
        if sum(report["held"].get(entry.name, 0) for report in reports) < math.prod(entry.shape)
    ]
    ignored = [name for name in incomplete if name not in transformed]
    for names, problem in (
        (differing, "hold other values than were sent"),
        (ignored, "were not taken by the engine"),
        (stale, "of the engine were not written"),
    ):
        if names:
            raise WeightsNotHeldError(f"{len(names)} tensors {problem}, such as {names[:_SHOWN]}")
    return [name for name in incomplete if name in transformed]
