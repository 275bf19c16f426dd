"""Makes a rollout server read its weights back from the engine, and compares them with what the learner published."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from rollwire.client.rollout import RolloutClient
from rollwire.coordinator.budgets import Budgets
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.weight_push import LOST_CODES, ServerLostError
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.versions import version_text
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2


class WeightVerifier:
    """Checks servers that have just got their first version; see `RolloutService.CheckWeights`.

    Args:
        fence: Identifies this coordinator.
        timeout_s: Longest time of one check.
        budgets: Bounds of retries.
        notice: Tells people about tensors that a server cannot read back.
    """

    def __init__(
        self, fence: trajectory_pb2.Fence, timeout_s: float, budgets: Budgets, notice: Callable[[str], None]
    ) -> None:
        self._fence = fence
        self._timeout_s = timeout_s
        self._budgets = budgets
        self._notice = notice

    async def verify(self, client: RolloutClient, version: weights_pb2.WeightVersion, digest: bytes) -> None:
        """Checks that a server's engine holds exactly a version.

        Args:
            client: The server; it has activated the version.
            version: The version.
            digest: Its digest as the learner states it.

        Raises:
            ServerLostError: The server does not answer.
            RunError: It holds something else, or cannot be checked.
        """
        answer = await self._ask(client)
        if answer.version != version or answer.digest != digest:
            raise RunError(
                f"the rollout server at {client.target} holds {version_text(answer.version)} with digest "
                f"{answer.digest.hex()[:16] or 'none'}, but the learner published {version_text(version)} with "
                f"{digest.hex()[:16] or 'none'}; does another coordinator use the same server?"
            )
        if answer.unverified:
            self._notice(
                f"{len(answer.unverified)} of {answer.tensors} tensors cannot be read back from the engine at "
                f"{client.target}, such as {answer.unverified[0]}; for them what was loaded counts"
            )

    async def _ask(self, client: RolloutClient) -> rollout_pb2.CheckWeightsResponse:
        request = rollout_pb2.CheckWeightsRequest(fence=self._fence)
        loop = asyncio.get_running_loop()
        end = loop.time() + self._budgets.lost_s
        while True:
            try:
                return await client.check_weights(request, timeout_s=self._timeout_s)
            except RollwireError as error:
                here = f"the rollout server at {client.target}"
                if error.reason == Reason.WEIGHTS_CORRUPT:
                    raise RunError(
                        f"{here} does not hold the weights that it was sent: {error.message}; its engine or memory is "
                        "faulty and would play another policy; run rollwire selftest weights CONFIG on that host"
                    ) from error
                if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    limit = f"timeouts.update_s={self._timeout_s:g}"
                    raise RunError(f"{here} could not read its weights back within {limit} s; raise it") from error
                if error.code in LOST_CODES:
                    raise ServerLostError(error.message) from error
                if error.reason != Reason.UPDATE_IN_PROGRESS or loop.time() >= end:
                    raise RunError(f"{here} cannot check its weights: {error}") from error
            await asyncio.sleep(self._budgets.poll_s)
