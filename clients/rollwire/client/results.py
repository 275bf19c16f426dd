"""From what an environment returned or raised to messages of the contract. Nothing invalid gets through."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping
from functools import lru_cache
from numbers import Real
from typing import Any, Final

import numpy as np

from rollwire.client.png import PNG_SIGNATURE, encode_png
from rollwire.rpc.ids import METRIC_PATTERN
from rollwire.rpc.limits import MAX_REPLY_BYTES, MIB
from rollwire.v1 import environment_pb2 as pb

MAX_TEXT_BYTES: Final = MIB
"""Longest observation, instructions, suffix or drawing as text, in bytes of UTF-8."""

MAX_PICTURE_BYTES: Final = MIB
"""Largest observation as a picture, as PNG."""

MAX_METRICS: Final = 256
_MAX_FAILURE_BYTES: Final = 4096
_ANSWERS: Final = "(observation, reward, terminated, truncated, info)"
# A path is quoted as OSError does it, or has at least two parts; the slashes of a URL and of `</answer>` are neither.
_PATHS: Final = re.compile(r"""(?P<quote>['"])/[^'"\n]+(?P=quote)|(?<![\w/<])(?:/[\w.@+~%-]+){2,}/?""")
_AGGREGATIONS: Final = {
    "mean": pb.METRIC_AGGREGATION_MEAN,
    "sum": pb.METRIC_AGGREGATION_SUM,
    "last": pb.METRIC_AGGREGATION_LAST,
    "first": pb.METRIC_AGGREGATION_FIRST,
    "max": pb.METRIC_AGGREGATION_MAX,
    "min": pb.METRIC_AGGREGATION_MIN,
}


class InvalidResultError(Exception):
    """The environment returned something outside the contract; the text says what."""


def failure_of(error: BaseException) -> pb.EnvironmentFailure:
    """Describes what an environment raised: type and one line, without paths and stack traces."""
    if isinstance(error, InvalidResultError):
        return failure(pb.ENVIRONMENT_FAILURE_KIND_INVALID_RESULT, "InvalidResult", str(error))
    try:
        # The text of an OSError holds the file name.
        message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    except BaseException:  # whatever an environment's own error does
        message = "(its text cannot be produced)"
    return failure(pb.ENVIRONMENT_FAILURE_KIND_ERROR, type(error).__name__, message)


def failure(kind: pb.EnvironmentFailureKind.ValueType, type_name: str, message: str) -> pb.EnvironmentFailure:
    """Makes a failure whose texts keep the limits of the contract."""
    line = " ".join(_PATHS.sub("<path>", message[: 4 * _MAX_FAILURE_BYTES]).split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    encoded = line.encode(errors="replace")
    if len(encoded) > _MAX_FAILURE_BYTES:
        encoded = encoded[: _MAX_FAILURE_BYTES - 3] + "…".encode()
    name = "".join(c if c.isprintable() else "?" for c in type_name[:128]).encode(errors="replace")
    return pb.EnvironmentFailure(kind=kind, type=name.decode(), message=encoded.decode(errors="ignore"))


def start_response(reply: object, max_turns: object) -> pb.OpenSessionResponse:
    """Checks what `reset` returned and the turn limit.

    Raises:
        InvalidResultError: Either is outside the contract.
    """
    if not isinstance(reply, tuple) or len(reply) != 2:
        raise InvalidResultError(f"reset returned {_shape(reply)}; allowed: (observation, info)")
    observation, info = reply
    if not isinstance(info, Mapping):
        raise InvalidResultError(f"reset returned an info of type {type(info).__name__}; allowed: a dict")
    response = pb.OpenSessionResponse(
        observation=_text("the observation", observation),
        instructions=_text("info['instructions']", info.get("instructions", "")),
        suffix=_text("info['suffix']", info.get("suffix", "")),
        max_turns=turn_limit(max_turns),
        observation_png=_picture(info),
    )
    _check_size(response)
    return response


def turn_limit(value: object) -> int:
    """Returns a valid turn limit. Raises `InvalidResultError`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value < 2**32:
        raise InvalidResultError(f"max_turns is {_shown(value)}; allowed: an integer from 1 to {2**32 - 1}")
    return int(value)


def step_response(reply: object) -> pb.StepResponse:
    """Checks what `step` returned.

    Raises:
        InvalidResultError: It is outside the contract.
    """
    if not isinstance(reply, tuple) or len(reply) != 5:
        raise InvalidResultError(f"step returned {_shape(reply)}; allowed: {_ANSWERS}")
    observation, reward, terminated, truncated, info = reply
    if not isinstance(info, Mapping):
        raise InvalidResultError(f"step returned an info of type {type(info).__name__}; allowed: a dict")
    response = pb.StepResponse(observation=_text("the observation", observation))
    # Most turns leave these at their defaults; every turn comes through here, so they cost nothing then.
    if reward != 0.0 or type(reward) is not float:
        response.reward = _finite("the reward", reward)
    if terminated is not False:
        response.terminated = _flag("terminated", terminated)
    if truncated is not False:
        response.truncated = _flag("truncated", truncated)
    suffix = info.get("suffix")
    if suffix:
        response.suffix = _text("info['suffix']", suffix)
    metrics = info.get("metrics")
    if metrics:
        _copy_metrics(metrics, response.metrics)
    if "observation_png" in info or "observation_rgb" in info:
        response.observation_png = _picture(info)
    _check_size(response)
    return response


def aggregations(modes: object) -> dict[str, pb.MetricAggregation.ValueType]:
    """Returns how metrics are aggregated.

    Args:
        modes: Metric name to `mean`, `sum`, `last`, `first`, `max` or `min`.

    Raises:
        InvalidResultError: It is no such mapping.
    """
    if not isinstance(modes, Mapping) or len(modes) > MAX_METRICS:
        raise InvalidResultError(
            f"metrics_agg_mode is {_shape(modes)}; allowed: a dict of at most {MAX_METRICS} entries"
        )
    found = {}
    for name, mode in modes.items():
        if not isinstance(mode, str) or mode not in _AGGREGATIONS:
            raise InvalidResultError(
                f"metrics_agg_mode holds {mode!r:.100} for {name!r:.100}; allowed: {', '.join(_AGGREGATIONS)}"
            )
        found[_metric_name(name)] = _AGGREGATIONS[mode]
    return found


def text_drawing(drawing: object) -> str:
    """Checks what `render_text` returned. Raises `InvalidResultError`."""
    return _text("the drawing", drawing)


def _check_size(response: pb.OpenSessionResponse | pb.StepResponse) -> None:
    """Raises when what is within its limit each does not fit into one message together."""
    size = response.ByteSize()
    if size > MAX_REPLY_BYTES:
        raise InvalidResultError(f"texts and picture have {size} bytes together; allowed: at most {MAX_REPLY_BYTES}")


def _copy_metrics(metrics: object, into: Any) -> None:
    if not isinstance(metrics, Mapping):
        raise InvalidResultError(f"info['metrics'] is of type {type(metrics).__name__}; allowed: a dict")
    if len(metrics) > MAX_METRICS:
        raise InvalidResultError(f"info['metrics'] has {len(metrics)} entries; allowed: at most {MAX_METRICS}")
    for name, value in metrics.items():
        number = value if type(value) is float and math.isfinite(value) else _finite(name, value)
        into[_metric_name(name)] = number


@lru_cache(1024)  # an environment reports the same few names in every turn
def _metric_name(name: Hashable) -> str:
    if not isinstance(name, str) or METRIC_PATTERN.fullmatch(name) is None:
        raise InvalidResultError(f"a metric is named {name!r:.100}; allowed: {METRIC_PATTERN.pattern}")
    return name


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidResultError(f"{what} is of type {type(value).__name__}; allowed: str")
    size = len(value)
    if not value.isascii():
        try:
            size = len(value.encode())
        except UnicodeEncodeError as error:
            raise InvalidResultError(
                f"{what} holds a lone surrogate at character {error.start}; allowed: UTF-8"
            ) from error
    if size > MAX_TEXT_BYTES:
        raise InvalidResultError(f"{what} has {size} bytes; allowed: at most {MAX_TEXT_BYTES}")
    return value


def _picture(info: Mapping[str, Any]) -> bytes:
    """Returns the observation's picture as a PNG file, from `observation_png` or `observation_rgb`; empty without."""
    png, rgb = info.get("observation_png"), info.get("observation_rgb")
    if png is not None and rgb is not None:
        raise InvalidResultError("info holds observation_png and observation_rgb; allowed: one of them")
    if rgb is not None:
        try:
            png = encode_png(rgb)
        except ValueError as error:
            raise InvalidResultError(f"info['observation_rgb']: {error}") from error
    if png is None or (isinstance(png, bytes) and not png):
        return b""
    if not isinstance(png, bytes) or not png.startswith(PNG_SIGNATURE):
        raise InvalidResultError(f"info['observation_png'] is {_shape(png)}; allowed: the bytes of a PNG file")
    if len(png) > MAX_PICTURE_BYTES:
        raise InvalidResultError(f"the picture has {len(png)} bytes as PNG; allowed: at most {MAX_PICTURE_BYTES}")
    return png


def _finite(what: str, value: object) -> float:
    if not isinstance(value, Real | np.bool_):
        raise InvalidResultError(f"{what} is of type {type(value).__name__}; allowed: a number")
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidResultError(f"{what} is {_shown(value)}; allowed: a finite number") from error
    if not math.isfinite(number):
        raise InvalidResultError(f"{what} is {number}; allowed: a finite number")
    return number


def _flag(what: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise InvalidResultError(f"{what} is of type {type(value).__name__}; allowed: bool")
    return bool(value)


def _shown(value: object) -> str:
    """Shows a value as far as Python does: it refuses integers of thousands of digits."""
    try:
        return f"{value!r:.100}"
    except Exception:
        return f"a value of type {type(value).__name__} that cannot be shown"


def _shape(value: object) -> str:
    """Names what came instead of a tuple."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a value of type {type(value).__name__}"
