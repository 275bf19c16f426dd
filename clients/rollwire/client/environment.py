"""Client of `EnvironmentService`."""

from __future__ import annotations

from typing import Any, cast

from rollwire.client.base import ServiceClient
from rollwire.rpc.channel import open_environment_channel
from rollwire.v1 import environment_pb2, environment_pb2_grpc


class EnvironmentClient(ServiceClient):
    """Opens and plays sessions. All methods raise `RollwireError`; a failed environment is data in the response."""

    service_name = "rollwire.v1.EnvironmentService"

    def __init__(self, target: str) -> None:
        super().__init__(target, open_environment_channel(target))
        self._stub = environment_pb2_grpc.EnvironmentServiceStub(self._channel)
        self._by_kind: dict[str, tuple[str, Any]] = {
            "open": ("OpenSession", self._stub.OpenSession),
            "step": ("Step", self._stub.Step),
            "renew": ("RenewSession", self._stub.RenewSession),
            "close": ("CloseSession", self._stub.CloseSession),
            "render": ("Render", self._stub.Render),
        }

    async def list_environments(self, *, timeout_s: float | None = None) -> environment_pb2.ListEnvironmentsResponse:
        """Returns the catalogue and the capacity."""
        request = environment_pb2.ListEnvironmentsRequest()
        answer = await self._unary("ListEnvironments", self._stub.ListEnvironments, request, timeout_s)
        return cast(environment_pb2.ListEnvironmentsResponse, answer)

    async def open_session(
        self, request: environment_pb2.OpenSessionRequest, *, timeout_s: float | None = None
    ) -> environment_pb2.OpenSessionResponse:
        """Starts a session."""
        answer = await self._unary("OpenSession", self._stub.OpenSession, request, timeout_s)
        return cast(environment_pb2.OpenSessionResponse, answer)

    async def step(
        self, session_id: str, turn: int, action: str, *, timeout_s: float | None = None
    ) -> environment_pb2.StepResponse:
        """Plays turn number `turn` (from 0); a repeat of the latest turn returns the same reply."""
        request = environment_pb2.StepRequest(session_id=session_id, turn=turn, action=action)
        answer = await self._unary("Step", self._stub.Step, request, timeout_s)
        return cast(environment_pb2.StepResponse, answer)

    async def renew_session(
        self, session_id: str, lease_s: float | None = None, *, timeout_s: float | None = None
    ) -> environment_pb2.RenewSessionResponse:
        """Extends the lease to `lease_s` seconds from now, 1 to 3600; None keeps the length granted before."""
        request = environment_pb2.RenewSessionRequest(session_id=session_id)
        if lease_s is not None:
            request.lease.FromNanoseconds(int(lease_s * 1e9))
        answer = await self._unary("RenewSession", self._stub.RenewSession, request, timeout_s)
        return cast(environment_pb2.RenewSessionResponse, answer)

    async def render(
        self, session_id: str, render_format: environment_pb2.RenderFormat.ValueType, *, timeout_s: float | None = None
    ) -> environment_pb2.RenderResponse:
        """Draws the current state."""
        request = environment_pb2.RenderRequest(session_id=session_id, format=render_format)
        answer = await self._unary("Render", self._stub.Render, request, timeout_s)
        return cast(environment_pb2.RenderResponse, answer)

    async def close_session(self, session_id: str, *, timeout_s: float | None = None) -> None:
        """Ends a session; unknown sessions are no error."""
        request = environment_pb2.CloseSessionRequest(session_id=session_id)
        await self._unary("CloseSession", self._stub.CloseSession, request, timeout_s)

    async def call(self, kind: str, request: Any, *, timeout_s: float | None = None) -> Any:
        """Makes a call by the name that it has in `SessionCall`: open, step, renew, close or render."""
        method, stub = self._by_kind[kind]
        return await self._unary(method, stub, request, timeout_s)

    def play_stream(self) -> Any:
        """Begins a bare `Play` stream, a `grpc.aio.StreamStreamCall`; `SessionStream` is what drives one."""
        return self._stub.Play()
