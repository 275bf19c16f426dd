"""Client of `CoordinatorService`."""

from __future__ import annotations

from typing import cast

from rollwire.client.base import ServiceClient
from rollwire.rpc.channel import open_channel
from rollwire.v1 import coordinator_pb2, coordinator_pb2_grpc


class CoordinatorClient(ServiceClient):
    """Shows and steers a run."""

    service_name = "rollwire.v1.CoordinatorService"

    def __init__(self, target: str) -> None:
        super().__init__(target, open_channel(target))
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)

    async def get_status(self, *, timeout_s: float | None = None) -> coordinator_pb2.GetStatusResponse:
        """Returns the status of the run. Raises `RollwireError`."""
        answer = await self._unary("GetStatus", self._stub.GetStatus, coordinator_pb2.GetStatusRequest(), timeout_s)
        return cast(coordinator_pb2.GetStatusResponse, answer)

    async def stop(self, cause: str, *, timeout_s: float | None = None) -> coordinator_pb2.StopResponse:
        """Asks the run to end after the step in progress. Raises `RollwireError`."""
        answer = await self._unary("Stop", self._stub.Stop, coordinator_pb2.StopRequest(cause=cause), timeout_s)
        return cast(coordinator_pb2.StopResponse, answer)
