"""An error inside a stream is the error that a unary call would have raised."""

from __future__ import annotations

import grpc
from hypothesis import given
from hypothesis import strategies as st

from rollwire.rpc.call_errors import deadline_exceeded, from_call_error, to_call_error
from rollwire.rpc.errors import Reason, RollwireError, exhausted, invalid_field
from rollwire.v1 import environment_pb2 as pb

_TEXT = st.text(max_size=50)


def parts(error: RollwireError) -> tuple[object, ...]:
    return error.code, error.reason, error.message, error.metadata, error.fields, error.retry_after_s


@given(
    code=st.sampled_from([code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]),
    reason=st.sampled_from([reason for reason in Reason if reason is not Reason.INVALID_FIELD]),
    message=_TEXT.filter(bool),
    metadata=st.dictionaries(_TEXT, _TEXT, max_size=3),
    retry_after_s=st.none() | st.floats(min_value=0, max_value=1e6).map(lambda value: round(value, 3)),
)
def test_round_trip(
    code: grpc.StatusCode, reason: Reason, message: str, metadata: dict[str, str], retry_after_s: float | None
) -> None:
    error = RollwireError(code, reason, message, metadata=metadata, retry_after_s=retry_after_s)
    encoded = pb.CallError.FromString(to_call_error(error).SerializeToString())
    read = from_call_error(encoded)
    assert (read.code, read.reason, read.message, read.metadata) == (code, str(reason), message, metadata)
    assert (read.retry_after_s is None) == (retry_after_s is None)
    assert abs((read.retry_after_s or 0) - (retry_after_s or 0)) < 1e-8


def test_field_paths_come_back_from_the_metadata() -> None:
    error = invalid_field("options.size", 1, "2 to 64")
    assert parts(from_call_error(to_call_error(error))) == parts(error)


def test_a_copy_is_equal_and_another() -> None:
    error = exhausted(Reason.SESSIONS_EXHAUSTED, "full", 2.0, session_capacity="4")
    assert parts(error.copy()) == parts(error) and error.copy() is not error


def test_what_grpc_itself_says_has_no_reason_on_the_wire() -> None:
    encoded = to_call_error(deadline_exceeded())
    assert (encoded.code, encoded.reason) == (4, "")
    assert parts(from_call_error(encoded)) == parts(deadline_exceeded())
