"""Errors of calls inside a stream: `CallError` says what a unary call's status would have said."""

from __future__ import annotations

from typing import Final

import grpc

from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import environment_pb2 as pb

_CODES: Final[dict[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}
_NS: Final = 10**9


def to_call_error(error: RollwireError) -> pb.CallError:
    """Encodes an error. `TRANSPORT` is for the client to say, as for a unary call, so it is sent as no reason."""
    reason = "" if error.reason == Reason.TRANSPORT else error.reason
    encoded = pb.CallError(code=error.code.value[0], reason=reason, message=error.message, metadata=error.metadata)
    if error.retry_after_s is not None:
        encoded.retry_after.FromNanoseconds(int(error.retry_after_s * _NS))
    return encoded


def from_call_error(encoded: pb.CallError) -> RollwireError:
    """Decodes an error; a code that gRPC does not know becomes UNKNOWN."""
    code = _CODES.get(encoded.code, grpc.StatusCode.UNKNOWN)
    if code is grpc.StatusCode.OK:
        code = grpc.StatusCode.UNKNOWN
    metadata = dict(encoded.metadata)
    message = encoded.message or code.name
    fields = {metadata["field"]: message} if encoded.reason == Reason.INVALID_FIELD and "field" in metadata else {}
    retry_after_s = encoded.retry_after.ToNanoseconds() / _NS if encoded.HasField("retry_after") else None
    return RollwireError(
        code,
        encoded.reason or Reason.TRANSPORT,
        message,
        metadata=metadata,
        fields=fields,
        retry_after_s=retry_after_s,
    )


def deadline_exceeded() -> RollwireError:
    """Returns what gRPC says, in its own words, about a call whose deadline has passed."""
    return RollwireError(grpc.StatusCode.DEADLINE_EXCEEDED, Reason.TRANSPORT, "Deadline Exceeded")
