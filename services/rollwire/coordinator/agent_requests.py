"""Checks of what agents ask for. Pure; errors name the field by its path."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from google.protobuf.duration_pb2 import Duration

from rollwire.coordinator.intake import MAX_REWARD
from rollwire.rpc.errors import invalid_field
from rollwire.rpc.ids import METRIC_PATTERN, REQUEST_ID_PATTERN
from rollwire.v1 import coordinator_pb2

DEFAULT_LEASE_S: Final = 600.0
MIN_LEASE_S: Final = 1.0
MAX_LEASE_S: Final = 3600.0
MAX_METRICS: Final = 256
MAX_CALLS: Final = 1024
MAX_FAILURE_BYTES: Final = 4096
_REWARD: Final = f"a number within ±{MAX_REWARD:g}"
_TASK_NAME: Final = re.compile(r"[ -~]{0,128}")


def check_open(request: coordinator_pb2.OpenAgentSessionRequest) -> float:
    """Checks a request and returns the lease in seconds.

    Raises:
        RollwireError: INVALID_ARGUMENT / `INVALID_FIELD`.
    """
    if REQUEST_ID_PATTERN.fullmatch(request.request_id) is None:
        raise invalid_field("request_id", request.request_id, "1 to 64 printable ASCII characters without blanks")
    if _TASK_NAME.fullmatch(request.task_name) is None:
        raise invalid_field("task_name", request.task_name, "at most 128 printable ASCII characters")
    if not request.HasField("lease"):
        return DEFAULT_LEASE_S
    lease_s = request.lease.seconds + request.lease.nanos / 1e9
    if not MIN_LEASE_S <= lease_s <= MAX_LEASE_S:
        raise invalid_field(
            "lease", f"{lease_s:g} s", f"{MIN_LEASE_S:g} s to {MAX_LEASE_S:g} s, or unset for {DEFAULT_LEASE_S:g} s"
        )
    return lease_s


def check_close(request: coordinator_pb2.CloseAgentSessionRequest) -> None:
    """Checks that there is exactly one result and that its numbers can be used.

    Raises:
        RollwireError: INVALID_ARGUMENT / `INVALID_FIELD`.
    """
    kind = request.WhichOneof("result")
    if kind is None:
        raise invalid_field("result", None, "either completed or failure")
    if kind == "failure":
        if len(request.failure.encode()) > MAX_FAILURE_BYTES:
            raise invalid_field("failure", request.failure, f"at most {MAX_FAILURE_BYTES} bytes")
        return
    result = request.completed
    if not abs(result.reward) <= MAX_REWARD:
        raise invalid_field("completed.reward", result.reward, _REWARD)
    _check_numbers("completed.call_rewards", result.call_rewards, MAX_CALLS, MAX_REWARD)
    _check_numbers("completed.metrics", result.metrics, MAX_METRICS, math.inf)
    for name in result.metrics:
        if METRIC_PATTERN.fullmatch(name) is None:
            raise invalid_field("completed.metrics", name, "names of 1 to 128 characters A-Z a-z 0-9 _ . / -")


def duration(seconds: float) -> Duration:
    """Returns a time as the contract carries it."""
    found = Duration()
    found.FromNanoseconds(int(seconds * 1e9))
    return found


def _check_numbers(path: str, values: Mapping[str, float], entries: int, largest: float) -> None:
    if len(values) > entries:
        raise invalid_field(path, f"{len(values)} entries", f"at most {entries} entries")
    for name, value in values.items():
        if not (math.isfinite(value) and abs(value) <= largest):
            raise invalid_field(f"{path}[{name!r}]", value, "a finite number" if largest == math.inf else _REWARD)
