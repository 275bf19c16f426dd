"""Checks of the fields of requests, before anything happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import grpc
from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration

from rollwire.rpc.errors import Reason, RollwireError, invalid_field
from rollwire.rpc.ids import REQUEST_ID_PATTERN, TAG_PATTERN, is_tag
from rollwire.rpc.limits import MIB
from rollwire.v1 import environment_pb2 as pb

MAX_ACTION_BYTES: Final = MIB
MAX_OPTIONS_BYTES: Final = 64 << 10
DEFAULT_LEASE_S: Final = 60.0
_MAX_LEASE_S: Final = 3600
_MAX_TIMEOUT_S: Final = 3600
_NS: Final = 10**9


def check_open(request: pb.OpenSessionRequest) -> None:
    """Checks identifiers of an opening. Raises `RollwireError` INVALID_ARGUMENT."""
    if REQUEST_ID_PATTERN.fullmatch(request.request_id) is None:
        raise invalid_field("request_id", request.request_id, "1 to 64 printable ASCII characters, unique per session")
    if not is_tag(request.environment_tag):
        raise invalid_field("environment_tag", request.environment_tag, f"{TAG_PATTERN.pattern} without '..'")


def read_options(request: pb.OpenSessionRequest) -> Mapping[str, Any]:
    """Returns the options as plain values; numbers are floats or ints. Raises `RollwireError` INVALID_ARGUMENT."""
    size = request.options.ByteSize()
    if size > MAX_OPTIONS_BYTES:
        raise invalid_field("options", f"{size} bytes", f"at most {MAX_OPTIONS_BYTES} bytes")
    try:
        plain: Mapping[str, Any] = json_format.MessageToDict(request.options)
    except (ValueError, json_format.SerializeToJsonError) as error:
        raise invalid_field("options", "a number that is not finite", "values that JSON can hold") from error
    return plain


def read_lease(lease: Duration) -> float:
    """Returns a lease in seconds. Raises `RollwireError` INVALID_ARGUMENT."""
    length_ns = lease.seconds * _NS + lease.nanos
    if not 0 <= lease.nanos < _NS or not _NS <= length_ns <= _MAX_LEASE_S * _NS:
        raise invalid_field(
            "lease", f"{length_ns / _NS:g} s", f"1 s to {_MAX_LEASE_S} s; unset means {DEFAULT_LEASE_S:g} s"
        )
    return length_ns / _NS


def read_timeout(call: pb.SessionCall) -> float:
    """Returns the deadline of a call in a stream, in seconds. Raises `RollwireError` INVALID_ARGUMENT."""
    if not call.HasField("timeout"):
        raise RollwireError(
            grpc.StatusCode.INVALID_ARGUMENT,
            Reason.DEADLINE_REQUIRED,
            "the call has no timeout; every call in a stream needs one",
        )
    length_ns = call.timeout.seconds * _NS + call.timeout.nanos
    if not 0 < length_ns <= _MAX_TIMEOUT_S * _NS or not 0 <= call.timeout.nanos < _NS:
        raise invalid_field("timeout", f"{length_ns / _NS:g} s", f"more than 0 s, at most {_MAX_TIMEOUT_S} s")
    return length_ns / _NS


def check_action(action: str) -> None:
    """Checks the length of an action. Raises `RollwireError` INVALID_ARGUMENT."""
    # No character takes more than four bytes: short actions need no encoding.
    if len(action) * 4 > MAX_ACTION_BYTES and (size := len(action.encode())) > MAX_ACTION_BYTES:
        raise invalid_field("action", f"{size} bytes", f"at most {MAX_ACTION_BYTES} bytes of UTF-8")


def check_render_format(render_format: pb.RenderFormat.ValueType) -> None:
    """Checks that a format is one of the contract. Raises `RollwireError` INVALID_ARGUMENT."""
    if render_format not in (pb.RENDER_FORMAT_TEXT, pb.RENDER_FORMAT_PNG):
        raise invalid_field("format", render_format, "RENDER_FORMAT_TEXT (1) or RENDER_FORMAT_PNG (2)")


def lease_message(lease_s: float) -> Duration:
    """Returns a lease as the contract shows it."""
    message = Duration()
    message.FromNanoseconds(round(lease_s * _NS))
    return message
