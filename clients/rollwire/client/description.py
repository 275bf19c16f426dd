"""How an environment describes itself, from a sample of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from google.protobuf import json_format, struct_pb2

from rollwire.client.results import InvalidResultError, aggregations, turn_limit
from rollwire.v1 import environment_pb2 as pb

_DRAWINGS: Final = (("render_text", pb.RENDER_FORMAT_TEXT), ("render_rgb", pb.RENDER_FORMAT_PNG))


def describe(
    tag: str, factory: Callable[..., object], sample: object, max_turns: object, defaults: Mapping[str, Any]
) -> pb.EnvironmentDescription:
    """Describes an environment as the catalogue shows it.

    Args:
        tag: Its tag.
        factory: What constructs it; the first line of its docstring is the summary.
        sample: One of its environments.
        max_turns: Turn limit of an episode; None when the environment does not say.
        defaults: Options that requests may set, with their effective defaults; values as JSON holds them.

    Raises:
        InvalidResultError: It has no `reset` or `step`, or its turn limit or `metrics_agg_mode` is not allowed.
    """
    for method in ("reset", "step"):
        if not callable(getattr(sample, method, None)):
            raise InvalidResultError(f"it has no method {method}; see docs/environments.md")
    if max_turns is None:
        raise InvalidResultError("it has no attribute max_turns; see docs/environments.md")
    summary = (inspect.getdoc(factory) or inspect.getdoc(type(sample)) or "").strip().splitlines()
    return pb.EnvironmentDescription(
        tag=tag,
        summary=summary[0] if summary else "",
        max_turns=turn_limit(max_turns),
        default_options=json_format.ParseDict(dict(defaults), struct_pb2.Struct()),
        render_formats=[value for method, value in _DRAWINGS if callable(getattr(sample, method, None))],
        metric_aggregation=aggregations(getattr(sample, "metrics_agg_mode", {})),
    )
