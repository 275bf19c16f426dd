"""Client of `CoordinatorService`."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
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

    async def open_agent_session(
        self, request: coordinator_pb2.OpenAgentSessionRequest, *, timeout_s: float | None = None
    ) -> coordinator_pb2.OpenAgentSessionResponse:
        """Asks for a task and access to the policy; `AgentSession` wraps this. Raises `RollwireError`."""
        answer = await self._unary("OpenAgentSession", self._stub.OpenAgentSession, request, timeout_s)
        return cast(coordinator_pb2.OpenAgentSessionResponse, answer)

    async def close_agent_session(
        self, request: coordinator_pb2.CloseAgentSessionRequest, *, timeout_s: float | None = None
    ) -> coordinator_pb2.CloseAgentSessionResponse:
        """Ends a session with its result or as failed. Raises `RollwireError`."""
        answer = await self._unary("CloseAgentSession", self._stub.CloseAgentSession, request, timeout_s)
        return cast(coordinator_pb2.CloseAgentSessionResponse, answer)

    async def get_submission_terms(
        self, environment_tag: str, *, timeout_s: float | None = None
    ) -> coordinator_pb2.GetSubmissionTermsResponse:
        """Returns what pushed trajectories must look like now. Raises `RollwireError`."""
        request = coordinator_pb2.GetSubmissionTermsRequest(environment_tag=environment_tag)
        answer = await self._unary("GetSubmissionTerms", self._stub.GetSubmissionTerms, request, timeout_s)
        return cast(coordinator_pb2.GetSubmissionTermsResponse, answer)

    def submit_trajectories(
        self,
        requests: AsyncIterable[coordinator_pb2.SubmitTrajectoriesRequest],
        *,
        timeout_s: float | None = None,
    ) -> AsyncIterator[coordinator_pb2.SubmitTrajectoriesResponse]:
        """Pushes trajectories; yields the fate of each in order. `TrajectoryPusher` wraps this."""
        return self._stream("SubmitTrajectories", self._stub.SubmitTrajectories, requests, timeout_s)
