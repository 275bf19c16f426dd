"""The status that the server gave to a call whose requests are a stream.

When a server ends such a call while the client still writes, grpcio's asyncio API replaces the server's status with
"INTERNAL: Internal error from Core" if it sees the failed write after the status (grpc/grpc issue 36066). The reason
of a refusal would be lost. The status that came first is still seen by the call's done callback.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

import grpc
import grpc.aio

from rollwire.rpc.errors import RollwireError, from_rpc_error

_FAILED_WRITE: Final = "Internal error from Core"


class FirstStatus:
    """Notes the first status of a call; make it right after the call, before anything is awaited."""

    def __init__(self, call: grpc.aio.Call) -> None:
        self._found: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._ended)

    def _ended(self, call: Any) -> None:
        found = grpc.aio.AioRpcError(
            _now(call.code()), grpc.aio.Metadata(), _now(call.trailing_metadata()), _now(call.details())
        )
        if not _is_failed_write(found):
            self._found = found

    def decode(self, raised: grpc.aio.AioRpcError) -> RollwireError:
        """Returns the error that ended the call: what was raised, or the server's status where that was replaced."""
        replaced = _is_failed_write(raised) and self._found is not None and self._found.code() is not grpc.StatusCode.OK
        return from_rpc_error(self._found if replaced and self._found else raised)


def _is_failed_write(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == _FAILED_WRITE


def _now(answer: Coroutine[Any, Any, Any]) -> Any:
    """Returns what a coroutine of a call that is done gives; it has nothing to wait for."""
    try:
        answer.send(None)
    except StopIteration as stop:
        return stop.value
    answer.close()
    raise RuntimeError("a call that is done made its caller wait for its status")
