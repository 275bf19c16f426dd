"""What happens to every call before and after its handler: parsing, deadline, error mapping.

gRPC would answer a malformed message with UNKNOWN and a Python type name; here requests are parsed by the interceptor,
so that the caller gets INVALID_ARGUMENT. A handler raises `RollwireError`; anything else is a bug and is answered as
INTERNAL with an id that the log holds beside the stack trace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from rollwire.rpc.deadlines import WITHOUT_DEADLINE
from rollwire.rpc.errors import Reason, RollwireError, to_status
from rollwire.rpc.ids import new_id
from rollwire.serving.logs import get_logger

_log = get_logger(__name__)

Handler: TypeAlias = Any  # grpc.RpcMethodHandler; grpc ships no types
Context: TypeAlias = Any  # grpc.aio.ServicerContext


class CallGate:
    """Stands between gRPC and every handler of a server. `draining` makes it refuse new calls.

    Handlers are wrapped once, when they are registered: a `grpc.aio.ServerInterceptor` would do the same work for each
    call and costs more than a small handler itself.
    """

    def __init__(self) -> None:
        self.draining = False

    def guard(self, server: Any) -> GuardedServer:
        """Returns what services register with instead of the server itself."""
        return GuardedServer(server, self)

    def wrap(self, method: str, handler: Handler) -> Handler:
        """Returns a handler that parses, admits and maps errors around another one."""
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
                self._admit(method, context)
                return await call(read(request), context)
            except Exception as error:
                await _abort(method, error, context)

        return wrapped

    def _streaming(self, method: str, call: Callable[..., Any], read: Callable[[Any], Any]) -> Callable[..., Any]:
        async def wrapped(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                self._admit(method, context)
                async for response in call(read(request), context):
                    yield response
            except Exception as error:
                await _abort(method, error, context)

        return wrapped

    def _admit(self, method: str, context: Context) -> None:
        if self.draining:
            raise draining_error()
        if context.time_remaining() is None and method not in WITHOUT_DEADLINE:
            raise RollwireError(
                grpc.StatusCode.INVALID_ARGUMENT,
                Reason.DEADLINE_REQUIRED,
                "the call has no deadline; every call to a Rollwire server needs one (timeout= in Python)",
            )


class GuardedServer:
    """The part of `grpc.aio.Server` that generated code registers handlers with; wraps them all.

    Attributes:
        service_names: Full names of the services registered so far.
    """

    def __init__(self, server: Any, gate: CallGate) -> None:
        self.service_names: set[str] = set()
        self._server = server
        self._gate = gate

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        """Adds handlers that are found by name."""
        handlers = tuple(handlers)
        self.service_names.update(handler.service_name() for handler in handlers)
        self._server.add_generic_rpc_handlers(tuple(_GuardedHandlers(handler, self._gate) for handler in handlers))

    def add_registered_method_handlers(self, service_name: str, handlers: Mapping[str, Handler]) -> None:
        """Adds the handlers of one service by method name."""
        self.service_names.add(service_name)
        wrapped = {name: self._gate.wrap(f"/{service_name}/{name}", handler) for name, handler in handlers.items()}
        self._server.add_registered_method_handlers(service_name, wrapped)


class _GuardedHandlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Wraps each handler that another collection finds, once per method."""

    def __init__(self, inner: Any, gate: CallGate) -> None:
        self._inner = inner
        self._gate = gate
        self._wrapped: dict[str, Handler] = {}  # bounded: only methods that the collection has

    def service(self, handler_call_details: Any) -> Handler | None:
        method: str = handler_call_details.method
        known = self._wrapped.get(method)
        if known is None:
            handler = self._inner.service(handler_call_details)
            if handler is None:
                return None
            known = self._wrapped[method] = self._gate.wrap(method, handler)
        return known


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


def draining_error() -> RollwireError:
    """Returns the answer to every call that comes while the server shuts down."""
    return RollwireError(grpc.StatusCode.UNAVAILABLE, Reason.DRAINING, "the server is shutting down; try another one")


def answerable(method: str, error: Exception) -> RollwireError:
    """Returns what the caller is told about `error`, and logs what people should know.

    Args:
        method: Full name of the method, for the log.
        error: A refusal, or anything else, which is a bug and is told as INTERNAL.
    """
    if not isinstance(error, RollwireError):
        incident = new_id("incident")
        _log.error("unexpected error in a handler", method=method, incident=incident, exc_info=error)
        return RollwireError(
            grpc.StatusCode.INTERNAL,
            Reason.INTERNAL,
            f"unexpected {type(error).__name__}; the server log has the details under {incident}",
            metadata={"incident": incident},
        )
    if error.code not in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND):
        _log.info("call refused", method=method, code=error.code.name, reason=error.reason, message=error.message)
    return error


async def _abort(method: str, error: Exception, context: Context) -> NoReturn:
    """Ends the call with the status for `error`."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, NotImplementedError) and context.code() == grpc.StatusCode.UNIMPLEMENTED:
        # What generated code does about a method that the servicer lacks; clients have other ways then.
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"this server does not offer {method}")
    told = answerable(method, error)
    if context.cancelled() or context.done():
        raise asyncio.CancelledError
    await context.abort_with_status(rpc_status.to_status(to_status(told)))
    raise AssertionError("abort_with_status returned")
