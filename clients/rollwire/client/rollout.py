"""Client of `RolloutService`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

from rollwire.client.base import ServiceClient
from rollwire.rpc.channel import open_channel
from rollwire.v1 import rollout_pb2, rollout_pb2_grpc


class RolloutClient(ServiceClient):
    """Samples episodes and tokens. All methods raise `RollwireError`."""

    service_name = "rollwire.v1.RolloutService"

    def __init__(self, target: str) -> None:
        super().__init__(target, open_channel(target))
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)

    async def get_info(self, *, timeout_s: float | None = None) -> rollout_pb2.RolloutServiceGetInfoResponse:
        """Returns model, limits and load."""
        request = rollout_pb2.RolloutServiceGetInfoRequest()
        answer = await self._unary("GetInfo", self._stub.GetInfo, request, timeout_s)
        return cast(rollout_pb2.RolloutServiceGetInfoResponse, answer)

    def run_group(
        self, request: rollout_pb2.RunGroupRequest, *, timeout_s: float | None = None
    ) -> AsyncIterator[rollout_pb2.RunGroupResponse]:
        """Plays a group; yields each result as it ends."""
        return self._stream("RunGroup", self._stub.RunGroup, request, timeout_s)

    def generate(
        self, request: rollout_pb2.GenerateRequest, *, timeout_s: float | None = None
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """Continues a token sequence; yields tokens as they are drawn."""
        return self._stream("Generate", self._stub.Generate, request, timeout_s)

    async def update_weights(
        self, request: rollout_pb2.UpdateWeightsRequest, *, timeout_s: float | None = None
    ) -> rollout_pb2.UpdateWeightsResponse:
        """Makes the server fetch and activate a version."""
        answer = await self._unary("UpdateWeights", self._stub.UpdateWeights, request, timeout_s)
        return cast(rollout_pb2.UpdateWeightsResponse, answer)

    async def check_weights(
        self, request: rollout_pb2.CheckWeightsRequest, *, timeout_s: float | None = None
    ) -> rollout_pb2.CheckWeightsResponse:
        """Makes the server read its weights back from the engine and compare them."""
        answer = await self._unary("CheckWeights", self._stub.CheckWeights, request, timeout_s)
        return cast(rollout_pb2.CheckWeightsResponse, answer)

    async def pause(
        self, request: rollout_pb2.PauseRequest, *, timeout_s: float | None = None
    ) -> rollout_pb2.PauseResponse:
        """Lets no generation start until `resume` or until the lease expires."""
        answer = await self._unary("Pause", self._stub.Pause, request, timeout_s)
        return cast(rollout_pb2.PauseResponse, answer)

    async def resume(
        self, request: rollout_pb2.ResumeRequest, *, timeout_s: float | None = None
    ) -> rollout_pb2.ResumeResponse:
        """Ends a pause."""
        answer = await self._unary("Resume", self._stub.Resume, request, timeout_s)
        return cast(rollout_pb2.ResumeResponse, answer)

    async def sleep(
        self, request: rollout_pb2.SleepRequest, *, timeout_s: float | None = None
    ) -> rollout_pb2.SleepResponse:
        """Pauses and frees the device's memory."""
        answer = await self._unary("Sleep", self._stub.Sleep, request, timeout_s)
        return cast(rollout_pb2.SleepResponse, answer)

    async def wake(
        self, request: rollout_pb2.WakeRequest, *, timeout_s: float | None = None
    ) -> rollout_pb2.WakeResponse:
        """Takes the device's memory again."""
        answer = await self._unary("Wake", self._stub.Wake, request, timeout_s)
        return cast(rollout_pb2.WakeResponse, answer)

    async def open_policy_session(
        self, request: rollout_pb2.OpenPolicySessionRequest, *, timeout_s: float | None = None
    ) -> rollout_pb2.OpenPolicySessionResponse:
        """Lets an agent call the policy through the server's HTTP edge."""
        answer = await self._unary("OpenPolicySession", self._stub.OpenPolicySession, request, timeout_s)
        return cast(rollout_pb2.OpenPolicySessionResponse, answer)

    async def close_policy_session(
        self, request: rollout_pb2.ClosePolicySessionRequest, *, timeout_s: float | None = None
    ) -> rollout_pb2.ClosePolicySessionResponse:
        """Ends an agent's session and returns what was recorded."""
        answer = await self._unary("ClosePolicySession", self._stub.ClosePolicySession, request, timeout_s)
        return cast(rollout_pb2.ClosePolicySessionResponse, answer)

    async def list_policy_sessions(
        self, request: rollout_pb2.ListPolicySessionsRequest, *, timeout_s: float | None = None
    ) -> rollout_pb2.ListPolicySessionsResponse:
        """Returns the open sessions of a run and how long each has been idle."""
        answer = await self._unary("ListPolicySessions", self._stub.ListPolicySessions, request, timeout_s)
        return cast(rollout_pb2.ListPolicySessionsResponse, answer)
