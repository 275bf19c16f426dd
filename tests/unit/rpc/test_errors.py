"""A `RollwireError` survives the wire."""

from __future__ import annotations

import grpc
from hypothesis import given
from hypothesis import strategies as st

from rollwire.rpc.errors import Reason, RollwireError, from_rpc_error, invalid_field, to_status

_TEXT = st.text(max_size=50)


class _Raised(grpc.RpcError):
    """What gRPC would raise at the client for a status."""

    def __init__(self, error: RollwireError) -> None:
        self._error = error

    def code(self) -> grpc.StatusCode:
        return self._error.code

    def details(self) -> str:
        return self._error.message

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return (("grpc-status-details-bin", to_status(self._error).SerializeToString()),)


@given(
    code=st.sampled_from([code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]),
    reason=st.sampled_from(list(Reason)),
    message=_TEXT.filter(bool),
    metadata=st.dictionaries(_TEXT, _TEXT, max_size=3),
    fields=st.dictionaries(_TEXT, _TEXT, max_size=3),
    retry_after_s=st.none() | st.floats(min_value=0, max_value=1e6).map(lambda value: round(value, 3)),
)
def test_round_trip(
    code: grpc.StatusCode,
    reason: Reason,
    message: str,
    metadata: dict[str, str],
    fields: dict[str, str],
    retry_after_s: float | None,
) -> None:
    sent = RollwireError(code, reason, message, metadata=metadata, fields=fields, retry_after_s=retry_after_s)
    got = from_rpc_error(_Raised(sent))
    assert (got.code, got.reason, got.message) == (code, reason, message)
    assert (got.metadata, got.fields) == (metadata, fields)
    if retry_after_s is None:
        assert got.retry_after_s is None
    else:
        assert got.retry_after_s is not None
        assert abs(got.retry_after_s - retry_after_s) < 1e-6


def test_invalid_field_names_path_value_and_allowed() -> None:
    error = invalid_field("sampling.top_p", 3.0, "a number in (0, 1]")
    assert str(error) == "INVALID_ARGUMENT/INVALID_FIELD: sampling.top_p is 3.0; allowed: a number in (0, 1]"
    assert list(error.fields) == ["sampling.top_p"]


def test_long_values_are_shortened() -> None:
    assert len(invalid_field("action", "x" * 10_000, "less").message) < 200
