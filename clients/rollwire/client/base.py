"""What the thin clients share: a channel, deadlines from the table, errors as `RollwireError`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollwire.rpc.deadlines import deadline_s
from rollwire.rpc.errors import from_rpc_error
from rollwire.rpc.first_status import FirstStatus


class ServiceClient:
    """Base of the clients; use as an async context manager or call `close`.

    Attributes:
        target: `host:port` of the server.
    """

    service_name = ""

    def __init__(self, target: str, channel: grpc.aio.Channel) -> None:
        self.target = target
        self._channel = channel

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel; running calls are cancelled."""
        await self._channel.close()

    async def is_ready(self) -> bool:
        """Tells whether the server says that it can answer calls; False when it cannot be reached."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=self.service_name), timeout=5)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def wait_ready(self, timeout_s: float, poll_s: float = 0.1) -> bool:
        """Waits until the server is ready; returns False when `timeout_s` passed first."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while not await self.is_ready():
            if loop.time() >= end:
                return False
            await asyncio.sleep(poll_s)
        return True

    def _deadline(self, method: str, timeout_s: float | None) -> float:
        return deadline_s(f"/{self.service_name}/{method}") if timeout_s is None else timeout_s

    async def _unary(self, method: str, stub_method: Any, request: Any, timeout_s: float | None) -> Any:
        """Calls a method with one response. Raises `RollwireError`."""
        try:
            return await stub_method(request, timeout=self._deadline(method, timeout_s))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def _stream(self, method: str, stub_method: Any, request: Any, timeout_s: float | None) -> AsyncIterator[Any]:
        """Calls a method with a response stream; leaving early cancels the call. Raises `RollwireError`."""
        call = stub_method(request, timeout=self._deadline(method, timeout_s))
        status = FirstStatus(call)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise status.decode(error) from error
        finally:
            call.cancel()
