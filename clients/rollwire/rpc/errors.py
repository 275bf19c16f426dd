"""Errors on the wire and in Python: one exception type, one table of reasons.

A server raises `RollwireError`; the serving interceptor turns it into a status with exactly one `ErrorInfo`. A client
gets a `RollwireError` back from `from_rpc_error`, equal in code, reason, message and metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN: Final = "rollwire"
_STATUS_KEY: Final = "grpc-status-details-bin"


class Reason(StrEnum):
    """Every reason that a Rollwire server gives; the table in docs/wire.md explains each."""

    INVALID_FIELD = "INVALID_FIELD"
    MALFORMED_MESSAGE = "MALFORMED_MESSAGE"
    DEADLINE_REQUIRED = "DEADLINE_REQUIRED"
    DIGEST_MISMATCH = "DIGEST_MISMATCH"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    UNKNOWN_ENVIRONMENT = "UNKNOWN_ENVIRONMENT"
    UNKNOWN_SESSION = "UNKNOWN_SESSION"
    UNKNOWN_VERSION = "UNKNOWN_VERSION"
    UNKNOWN_CHECKPOINT = "UNKNOWN_CHECKPOINT"
    WRONG_TURN = "WRONG_TURN"
    EPISODE_ENDED = "EPISODE_ENDED"
    ENVIRONMENT_DISABLED = "ENVIRONMENT_DISABLED"
    RENDER_UNSUPPORTED = "RENDER_UNSUPPORTED"
    TAG_TAKEN = "TAG_TAKEN"
    DESCRIPTION_MISMATCH = "DESCRIPTION_MISMATCH"
    AGENTS_DISABLED = "AGENTS_DISABLED"
    NO_CALLS = "NO_CALLS"
    RUN_ENDED = "RUN_ENDED"
    NO_WEIGHTS = "NO_WEIGHTS"
    ASLEEP = "ASLEEP"
    SLEEP_DISABLED = "SLEEP_DISABLED"
    WRONG_VERSION = "WRONG_VERSION"
    STEP_CONFLICT = "STEP_CONFLICT"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CHECKPOINT_MISMATCH = "CHECKPOINT_MISMATCH"
    CHECKPOINT_CORRUPT = "CHECKPOINT_CORRUPT"
    WEIGHTS_MISMATCH = "WEIGHTS_MISMATCH"
    WEIGHTS_CORRUPT = "WEIGHTS_CORRUPT"
    WEIGHT_SOURCE_UNAVAILABLE = "WEIGHT_SOURCE_UNAVAILABLE"
    UPDATE_IN_PROGRESS = "UPDATE_IN_PROGRESS"
    STEP_IN_PROGRESS = "STEP_IN_PROGRESS"
    FENCED = "FENCED"
    PROVIDER_REPLACED = "PROVIDER_REPLACED"
    SESSIONS_EXHAUSTED = "SESSIONS_EXHAUSTED"
    EPISODES_EXHAUSTED = "EPISODES_EXHAUSTED"
    REQUESTS_EXHAUSTED = "REQUESTS_EXHAUSTED"
    PROVIDERS_EXHAUSTED = "PROVIDERS_EXHAUSTED"
    DEVICE_MEMORY_EXHAUSTED = "DEVICE_MEMORY_EXHAUSTED"
    HOST_MEMORY_EXHAUSTED = "HOST_MEMORY_EXHAUSTED"
    STORAGE_FAILED = "STORAGE_FAILED"
    DRAINING = "DRAINING"
    RANK_FAILED = "RANK_FAILED"
    INTERNAL = "INTERNAL"
    TRANSPORT = "TRANSPORT"
    """Made by the client side alone: the call failed without an answer from a Rollwire server."""


class RollwireError(Exception):
    """A call that failed.

    Attributes:
        code: Canonical gRPC code.
        reason: Stable machine-readable reason; a string that is not in `Reason` when a newer server sent it.
        message: One line for people: what was wrong, the value, what is allowed, what to do.
        metadata: The values named in the message, as strings.
        fields: Field path to description, for INVALID_ARGUMENT.
        retry_after_s: When a retry makes sense, how long to wait; else None.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: Reason | str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = str(reason)
        self.message = message
        self.metadata = dict(metadata or {})
        self.fields = dict(fields or {})
        self.retry_after_s = retry_after_s

    def copy(self) -> RollwireError:
        """Returns an equal error, for another call that fails for the same cause."""
        return RollwireError(
            self.code,
            self.reason,
            self.message,
            metadata=self.metadata,
            fields=self.fields,
            retry_after_s=self.retry_after_s,
        )

    def __str__(self) -> str:
        return f"{self.code.name}/{self.reason}: {self.message}"


def invalid_field(path: str, value: object, allowed: str) -> RollwireError:
    """Returns the error for a field outside its range.

    Args:
        path: Field path in the request, such as `sampling.top_p`.
        value: The offending value; shown shortened.
        allowed: What is allowed, such as `a number in (0, 1]`.
    """
    shown = _shortened(repr(value))
    if not path.isprintable() or len(path) > 200:  # it may hold what the caller sent, such as a name of an option
        path = _shortened(repr(path)[1:-1])
    message = f"{path} is {shown}; allowed: {allowed}"
    return RollwireError(
        grpc.StatusCode.INVALID_ARGUMENT,
        Reason.INVALID_FIELD,
        message,
        metadata={"field": path, "value": shown},
        fields={path: message},
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else text[:100] + "…"


def precondition(reason: Reason, message: str, **metadata: str) -> RollwireError:
    """Returns a FAILED_PRECONDITION: the caller must change something before it asks again."""
    return RollwireError(grpc.StatusCode.FAILED_PRECONDITION, reason, message, metadata=metadata)


def not_found(reason: Reason, message: str, **metadata: str) -> RollwireError:
    """Returns a NOT_FOUND."""
    return RollwireError(grpc.StatusCode.NOT_FOUND, reason, message, metadata=metadata)


def exhausted(reason: Reason, message: str, retry_after_s: float, **metadata: str) -> RollwireError:
    """Returns a RESOURCE_EXHAUSTED with the delay after which a retry makes sense."""
    return RollwireError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, reason, message, metadata=metadata, retry_after_s=retry_after_s
    )


def to_status(error: RollwireError) -> status_pb2.Status:
    """Encodes an error as `google.rpc.Status`: one `ErrorInfo`, with `BadRequest` or `RetryInfo` where they apply."""
    details: list[any_pb2.Any] = []

    def add(message: object) -> None:
        packed = any_pb2.Any()
        packed.Pack(message)  # type: ignore[arg-type]
        details.append(packed)

    add(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))
    if error.fields:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=path, description=text)
            for path, text in error.fields.items()
        ]
        add(error_details_pb2.BadRequest(field_violations=violations))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        add(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(code=code_pb2.Code.Value(error.code.name), message=error.message, details=details)


def from_rpc_error(error: grpc.RpcError) -> RollwireError:
    """Decodes what gRPC raised, sync or aio. Without Rollwire's `ErrorInfo` the reason is `TRANSPORT`."""
    code: grpc.StatusCode = error.code()
    message: str = error.details() or code.name
    found = RollwireError(code, Reason.TRANSPORT, message)
    for key, value in error.trailing_metadata() or ():
        if key != _STATUS_KEY:
            continue
        for detail in status_pb2.Status.FromString(value).details:
            _read_detail(detail, found)
    return found


def _read_detail(detail: any_pb2.Any, into: RollwireError) -> None:
    """Copies what one status detail says into the error; unknown details are skipped."""
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    if detail.Unpack(info) and info.domain == DOMAIN:
        into.reason = info.reason
        into.metadata = dict(info.metadata)
    elif detail.Unpack(bad):
        into.fields = {violation.field: violation.description for violation in bad.field_violations}
    elif detail.Unpack(retry):
        into.retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
