"""Checks of what a provider sends. It is somebody else's program: nothing of it is believed. Pure."""

from __future__ import annotations

import math
from typing import Final

from rollwire.client.png import PNG_SIGNATURE
from rollwire.client.results import MAX_METRICS, MAX_TEXT_BYTES, failure
from rollwire.rpc.errors import invalid_field
from rollwire.rpc.ids import METRIC_PATTERN, NAME_PATTERN, TAG_PATTERN, is_name, is_tag
from rollwire.rpc.limits import MAX_CHUNK_BYTES, MIB
from rollwire.v1 import environment_pb2 as pb

MAX_TAGS: Final = 64
MAX_CAPACITY: Final = 65_536
_MAX_SESSION_ID: Final = 128
_MAX_PROGRAM: Final = 128
_MAX_SUMMARY: Final = 1024
_MAX_OPTIONS_BYTES: Final = 64 << 10
_MIN_ID: Final = 16
_KINDS: Final = frozenset(pb.EnvironmentFailureKind.values()) - {pb.ENVIRONMENT_FAILURE_KIND_UNSPECIFIED}


def check_hello(hello: pb.ProviderHello) -> None:
    """Checks how a provider introduces itself. Raises `RollwireError` INVALID_ARGUMENT."""
    if not is_name(hello.provider_id) or len(hello.provider_id) < _MIN_ID:
        raise invalid_field(
            "hello.provider_id", hello.provider_id, f"{NAME_PATTERN.pattern}, at least {_MIN_ID} random characters"
        )
    if not 1 <= len(hello.environments) <= MAX_TAGS:
        raise invalid_field("hello.environments", f"{len(hello.environments)} tags", f"1 to {MAX_TAGS}")
    if not 1 <= hello.capacity <= MAX_CAPACITY:
        raise invalid_field("hello.capacity", hello.capacity, f"1 to {MAX_CAPACITY}")
    if len(hello.session_ids) > MAX_CAPACITY:
        raise invalid_field("hello.session_ids", f"{len(hello.session_ids)} sessions", f"at most {MAX_CAPACITY}")
    for index, session_id in enumerate(hello.session_ids):
        if (problem := session_id_problem(session_id)) is not None:
            raise invalid_field(f"hello.session_ids[{index}]", session_id, problem)
    if len(hello.program) > _MAX_PROGRAM or not hello.program.isprintable():
        raise invalid_field("hello.program", hello.program, f"at most {_MAX_PROGRAM} printable characters")
    seen = set()
    for index, description in enumerate(hello.environments):
        _check_description(f"hello.environments[{index}]", description)
        if description.tag in seen:
            raise invalid_field(f"hello.environments[{index}].tag", description.tag, "each tag once")
        seen.add(description.tag)


def _check_description(path: str, description: pb.EnvironmentDescription) -> None:
    if not is_tag(description.tag):
        raise invalid_field(f"{path}.tag", description.tag, f"{TAG_PATTERN.pattern} without '..'")
    if len(description.summary) > _MAX_SUMMARY or not description.summary.isprintable():
        raise invalid_field(f"{path}.summary", description.summary, f"one line of at most {_MAX_SUMMARY} characters")
    if description.max_turns < 1:
        raise invalid_field(f"{path}.max_turns", description.max_turns, "1 or more")
    if (size := description.default_options.ByteSize()) > _MAX_OPTIONS_BYTES:
        raise invalid_field(f"{path}.default_options", f"{size} bytes", f"at most {_MAX_OPTIONS_BYTES} bytes")
    for value in description.render_formats:
        if value not in (pb.RENDER_FORMAT_TEXT, pb.RENDER_FORMAT_PNG):
            raise invalid_field(f"{path}.render_formats", value, "RENDER_FORMAT_TEXT (1) or RENDER_FORMAT_PNG (2)")
    if len(description.metric_aggregation) > MAX_METRICS:
        count = len(description.metric_aggregation)
        raise invalid_field(f"{path}.metric_aggregation", f"{count} metrics", f"at most {MAX_METRICS}")
    for name, mode in description.metric_aggregation.items():
        if METRIC_PATTERN.fullmatch(name) is None:
            raise invalid_field(f"{path}.metric_aggregation", name, f"names as in {METRIC_PATTERN.pattern}")
        if mode not in pb.MetricAggregation.values():
            raise invalid_field(f"{path}.metric_aggregation[{name}]", mode, "a value of MetricAggregation")


def session_id_problem(session_id: str) -> str | None:
    """Returns what is allowed instead of a provider's session id, or None when it is all right."""
    if 1 <= len(session_id) <= _MAX_SESSION_ID and session_id.isprintable():
        return None
    return f"1 to {_MAX_SESSION_ID} printable characters"


def checked_open(response: pb.OpenSessionResponse) -> pb.EnvironmentFailure | None:
    """Returns how an opening failed, by its own word or because it is outside the contract; None when it did not."""
    if response.HasField("failure"):
        return checked_failure(response.failure)
    problem = None
    if (allowed := session_id_problem(response.session_id)) is not None:
        problem = f"session_id is {response.session_id!r:.100}; allowed: {allowed}"
    elif response.max_turns < 1:
        problem = "max_turns is 0; allowed: 1 or more"
    else:
        texts = (
            ("instructions", response.instructions),
            ("observation", response.observation),
            ("suffix", response.suffix),
        )
        problem = _text_problem(*texts) or _picture_problem(response.observation_png)
    return _outside(problem)


def checked_step(response: pb.StepResponse) -> pb.EnvironmentFailure | None:
    """Returns how a turn failed, by its own word or because it is outside the contract; None when it did not."""
    if response.HasField("failure"):
        return checked_failure(response.failure)
    if not math.isfinite(response.reward):
        return _outside(f"reward is {response.reward}; allowed: a finite number")
    problem = _text_problem(("observation", response.observation), ("suffix", response.suffix))
    problem = problem or _picture_problem(response.observation_png)
    if problem is None and response.metrics:
        problem = _metrics_problem(response)
    return _outside(problem)


def checked_drawing(response: pb.RenderResponse, render_format: int) -> pb.EnvironmentFailure | None:
    """Returns what is wrong with a drawing, or None."""
    wanted = "text" if render_format == pb.RENDER_FORMAT_TEXT else "png"
    if response.WhichOneof("drawing") != wanted:
        return _outside(f"the drawing is {response.WhichOneof('drawing') or 'empty'}; allowed: {wanted}")
    if wanted == "text":
        return _outside(_text_problem(("text", response.text)))
    if len(response.png) > MAX_CHUNK_BYTES or not response.png.startswith(PNG_SIGNATURE):
        return _outside(f"png has {len(response.png)} bytes; allowed: a PNG file of at most {MAX_CHUNK_BYTES}")
    return None


def checked_failure(found: pb.EnvironmentFailure) -> pb.EnvironmentFailure:
    """Returns a provider's failure with texts that keep the limits of the contract."""
    kind = found.kind if found.kind in _KINDS else pb.ENVIRONMENT_FAILURE_KIND_ERROR
    return failure(kind, found.type or "EnvironmentFailure", found.message)


def _text_problem(*texts: tuple[str, str]) -> str | None:
    for name, text in texts:
        # No character takes more than four bytes: short texts need no encoding.
        if len(text) * 4 > MAX_TEXT_BYTES and (size := len(text.encode())) > MAX_TEXT_BYTES:
            return f"{name} has {size} bytes; allowed: at most {MAX_TEXT_BYTES}"
    return None


def _picture_problem(png: bytes) -> str | None:
    if png and (len(png) > MIB or not png.startswith(PNG_SIGNATURE)):
        return f"observation_png has {len(png)} bytes; allowed: a PNG file of at most {MIB}"
    return None


def _metrics_problem(response: pb.StepResponse) -> str | None:
    if len(response.metrics) > MAX_METRICS:
        return f"{len(response.metrics)} metrics; allowed: at most {MAX_METRICS}"
    for name, value in response.metrics.items():
        if METRIC_PATTERN.fullmatch(name) is None:
            return f"a metric is named {name!r:.100}; allowed: {METRIC_PATTERN.pattern}"
        if not math.isfinite(value):
            return f"the metric {name} is {value}; allowed: a finite number"
    return None


def _outside(problem: str | None) -> pb.EnvironmentFailure | None:
    if problem is None:
        return None
    return failure(pb.ENVIRONMENT_FAILURE_KIND_INVALID_RESULT, "InvalidResult", f"the provider answered: {problem}")
