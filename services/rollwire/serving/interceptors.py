"""What happens to every call before and after its handler: parsing, deadline, error mapping.

gRPC would answer a malformed message with UNKNOWN and a Python type name; here requests are parsed by the interceptor,
so that the caller gets INVALID_ARGUMENT. A handler raises `RollwireError`; anything else is a bug and is answered as
INTERNAL with an id that the log holds beside the stack trace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from rollwire.rpc.errors import Reason, RollwireError, to_status
from rollwire.rpc.ids import new_id
from rollwire.serving.logs import get_logger

_log = get_logger(__name__)
_EXEMPT = ("/grpc.health.v1.Health/", "/grpc.reflection.")

Handler: TypeAlias = Any  # grpc.RpcMethodHandler; grpc ships no types
Context: TypeAlias = Any  # grpc.aio.ServicerContext


class CallGate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The interceptor that all Rollwire servers install. `draining` makes it refuse new calls."""

    def __init__(self) -> None:
        self.draining = False
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Handler | None]], handler_call_details: Any
    ) -> Handler | None:
        """Returns the wrapped handler of a method; health checks and reflection pass unchanged."""
        method: str = handler_call_details.method
        known = self._wrapped.get(method)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None or method.startswith(_EXEMPT):
            return handler
        wrapped = self._wrap(method, handler)
        self._wrapped[method] = wrapped  # bounded: only methods that the server has
        return wrapped

    def _wrap(self, method: str, handler: Handler) -> Handler:
        kinds = {
            (False, False): (grpc.unary_unary_rpc_method_handler, self._unary, handler.unary_unary),
            (True, False): (grpc.stream_unary_rpc_method_handler, self._unary, handler.stream_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, self._streaming, handler.unary_stream),
            (True, True): (grpc.stream_stream_rpc_method_handler, self._streaming, handler.stream_stream),
        }
        make, wrap, call = kinds[handler.request_streaming, handler.response_streaming]
        read = _reader(handler)
        return make(
            wrap(method, call, read), request_deserializer=None, response_serializer=handler.response_serializer
        )

    def _unary(self, method: str, call: Callable[..., Any], read: Callable[[Any], Any]) -> Callable[..., Any]:
        async def wrapped(request: Any, context: Context) -> Any:
            try:
                self._admit(context)
                return await call(read(request), context)
            except Exception as error:
                await _abort(method, error, context)

        return wrapped

    def _streaming(self, method: str, call: Callable[..., Any], read: Callable[[Any], Any]) -> Callable[..., Any]:
        async def wrapped(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                self._admit(context)
                async for response in call(read(request), context):
                    yield response
            except Exception as error:
                await _abort(method, error, context)

        return wrapped

    def _admit(self, context: Context) -> None:
        if self.draining:
            raise RollwireError(
                grpc.StatusCode.UNAVAILABLE, Reason.DRAINING, "the server is shutting down; try another one"
            )
        if context.time_remaining() is None:
            raise RollwireError(
                grpc.StatusCode.INVALID_ARGUMENT,
                Reason.DEADLINE_REQUIRED,
                "the call has no deadline; every call to a Rollwire server needs one (timeout= in Python)",
            )


def _reader(handler: Handler) -> Callable[[Any], Any]:
    """Returns what turns the raw request, or request stream, of a handler into messages."""
    parse = handler.request_deserializer

    def one(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            raise RollwireError(
                grpc.StatusCode.INVALID_ARGUMENT,
                Reason.MALFORMED_MESSAGE,
                "the request is not a valid protobuf message of this method; check that the client uses rollwire.v1",
            ) from error

    async def many(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield one(data)

    return many if handler.request_streaming else one


async def _abort(method: str, error: Exception, context: Context) -> NoReturn:
    """Ends the call with the status for `error`."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, RollwireError):
        incident = new_id("incident")
        _log.error("unexpected error in a handler", method=method, incident=incident, exc_info=error)
        error = RollwireError(
            grpc.StatusCode.INTERNAL,
            Reason.INTERNAL,
            f"unexpected {type(error).__name__}; the server log has the details under {incident}",
            metadata={"incident": incident},
        )
    elif error.code not in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND):
        _log.info("call refused", method=method, code=error.code.name, reason=error.reason, message=error.message)
    if context.cancelled() or context.done():
        raise asyncio.CancelledError
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("abort_with_status returned")
