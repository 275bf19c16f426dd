"""`CoordinatorService`: shows and stops the run, lets agents and pushers in. Holds no state of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import grpc
import grpc.aio

from rollwire.client.base import ServiceClient
from rollwire.client.learner import LearnerClient
from rollwire.client.rollout import RolloutClient
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.external import External
from rollwire.coordinator.peers import Peers
from rollwire.coordinator.run_gate import starting
from rollwire.coordinator.status import RunStatus
from rollwire.rpc.errors import Reason, RollwireError, invalid_field
from rollwire.rpc.limits import INTERNAL_MESSAGE_BYTES
from rollwire.serving.server import Readiness
from rollwire.v1 import coordinator_pb2, coordinator_pb2_grpc

MAX_CAUSE_CHARS: Final = 256
ASK_TIMEOUT_S: Final = 3.0


class CoordinatorServer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Serves one run.

    Attributes:
        external: The outside of the run; None while it is starting.

    Args:
        status: State of the run.
        peers: Its servers.
    """

    full_name = "rollwire.v1.CoordinatorService"
    message_bytes = INTERNAL_MESSAGE_BYTES

    def __init__(self, status: RunStatus, peers: Peers) -> None:
        self.external: External | None = None
        self._status = status
        self._peers = peers

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer to the server."""
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(self, server)

    async def start(self, readiness: Readiness) -> None:
        """Is ready at once."""
        await readiness.set(True)

    async def close(self) -> None:
        """Has nothing to free."""

    async def GetStatus(
        self, request: coordinator_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> coordinator_pb2.GetStatusResponse:
        """Describes the run; asks every server whether it is ready."""
        status = self._status
        services = await asyncio.gather(*(service_status(kind, client) for kind, client in self._peers.all))
        response = coordinator_pb2.GetStatusResponse(
            run_id=status.run_id,
            run_name=status.run_name,
            epoch=status.epoch,
            state=status.state,
            step=status.step,
            max_steps=status.max_steps,
            version=status.version,
            latest_metrics=status.latest,
            services=services,
        )
        response.elapsed.FromNanoseconds(int(status.elapsed_s * 1e9))
        return response

    async def Stop(
        self, request: coordinator_pb2.StopRequest, context: grpc.aio.ServicerContext
    ) -> coordinator_pb2.StopResponse:
        """Asks the run to end after the step in progress."""
        if len(request.cause) > MAX_CAUSE_CHARS:
            raise invalid_field("cause", request.cause, f"at most {MAX_CAUSE_CHARS} characters")
        self._status.request_stop(request.cause)
        return coordinator_pb2.StopResponse(state=self._status.state)

    async def OpenAgentSession(
        self, request: coordinator_pb2.OpenAgentSessionRequest, context: grpc.aio.ServicerContext
    ) -> coordinator_pb2.OpenAgentSessionResponse:
        """Gives an agent a task and access to the policy."""
        return await self._outside().open_agent_session(request)

    async def CloseAgentSession(
        self, request: coordinator_pb2.CloseAgentSessionRequest, context: grpc.aio.ServicerContext
    ) -> coordinator_pb2.CloseAgentSessionResponse:
        """Ends a session with its reward, or as failed."""
        return await self._outside().close_agent_session(request)

    async def GetSubmissionTerms(
        self, request: coordinator_pb2.GetSubmissionTermsRequest, context: grpc.aio.ServicerContext
    ) -> coordinator_pb2.GetSubmissionTermsResponse:
        """Says what pushed trajectories must look like."""
        return await self._outside().submission_terms(request.environment_tag)

    async def SubmitTrajectories(
        self,
        request_iterator: AsyncIterator[coordinator_pb2.SubmitTrajectoriesRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[coordinator_pb2.SubmitTrajectoriesResponse]:
        """Takes pushed trajectories in and answers each with its fate."""
        try:
            async for response in self._outside().submit(request_iterator):
                yield response
        except RunError as error:  # the ledger cannot be written, which the run will notice as well
            raise RollwireError(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.STORAGE_FAILED, str(error)) from error

    def _outside(self) -> External:
        if self.external is None:
            raise starting()
        return self.external


async def service_status(
    kind: coordinator_pb2.ServiceKind.ValueType, client: ServiceClient
) -> coordinator_pb2.ServiceStatus:
    """Asks one server whether it is ready and which version it has."""
    status = coordinator_pb2.ServiceStatus(kind=kind, target=client.target, ready=await client.is_ready())
    try:
        if status.ready and isinstance(client, RolloutClient):
            status.version.CopyFrom((await client.get_info(timeout_s=ASK_TIMEOUT_S)).active_version)
        elif status.ready and isinstance(client, LearnerClient):
            status.version.CopyFrom((await client.get_info(timeout_s=ASK_TIMEOUT_S)).version)
    except RollwireError:
        status.ready = False
    return status
