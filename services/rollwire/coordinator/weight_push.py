"""Brings one version to one rollout server and checks that what it then serves is what the learner published."""

from __future__ import annotations

import asyncio
from typing import Final

import grpc

from rollwire.client.rollout import RolloutClient
from rollwire.coordinator.budgets import Budgets
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.ledger_schema import VersionRecord
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.versions import version_text
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2

_TRY_AGAIN: Final = (Reason.WEIGHT_SOURCE_UNAVAILABLE, Reason.WEIGHTS_CORRUPT, Reason.UPDATE_IN_PROGRESS)
_RELAY_FAULTS: Final = (Reason.WEIGHT_SOURCE_UNAVAILABLE, Reason.WEIGHTS_CORRUPT, Reason.UNKNOWN_VERSION)
LOST_CODES: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
)


class ServerLostError(Exception):
    """A server cannot be reached or goes away; the text says what was seen."""


class RelayError(Exception):
    """A server could not fetch a version from another server; the learner may still give it."""


class UnknownVersionError(RunError):
    """The learner does not hold a version; it may have published the next one meanwhile."""


class WeightPusher:
    """Makes rollout servers fetch versions from the learner or from each other.

    Args:
        fence: Identifies this coordinator.
        learner_target: Where servers fetch from.
        timeout_s: Longest time of one update.
        budgets: Bounds of retries.
        pause_mode: What happens to generations that run during an update.
    """

    def __init__(
        self,
        fence: trajectory_pb2.Fence,
        learner_target: str,
        timeout_s: float,
        budgets: Budgets,
        pause_mode: rollout_pb2.PauseMode.ValueType = rollout_pb2.PAUSE_MODE_WAIT,
    ) -> None:
        self._fence = fence
        self.learner_target = learner_target
        self._timeout_s = timeout_s
        self._budgets = budgets
        self._pause_mode = pause_mode

    async def activate(
        self, client: RolloutClient, version: weights_pb2.WeightVersion, digest: bytes, relay: str | None = None
    ) -> VersionRecord:
        """Makes a server serve a version.

        Args:
            client: The server.
            version: Version wanted.
            digest: Digest that the learner states for it.
            relay: Rollout server to fetch from; None means the learner.

        Raises:
            ServerLostError: The server does not answer.
            RelayError: It could not fetch the version from the relay.
            RunError: It refuses the version, keeps failing to fetch it, or holds other weights after loading it.
        """
        response = await self._update(client, version, relay)
        if response.version != version or response.digest != digest:
            raise RunError(
                f"the rollout server at {client.target} serves {version_text(response.version)} with digest "
                f"{response.digest.hex()[:16] or 'none'}, but the learner published {version_text(version)} with "
                f"{digest.hex()[:16] or 'none'}; check that both use the same model and model.dtype"
            )
        return VersionRecord(
            version=version,
            target=client.target,
            digest=response.digest,
            received_bytes=response.received_bytes,
            fetch_s=response.fetch_duration.ToNanoseconds() / 1e9,
            pause_s=response.pause_duration.ToNanoseconds() / 1e9,
        )

    async def _update(
        self, client: RolloutClient, version: weights_pb2.WeightVersion, relay: str | None
    ) -> rollout_pb2.UpdateWeightsResponse:
        source = weights_pb2.WeightSource(target=relay or self.learner_target)
        request = rollout_pb2.UpdateWeightsRequest(
            fence=self._fence, version=version, source=source, pause_mode=self._pause_mode
        )
        loop = asyncio.get_running_loop()
        end = loop.time() + self._budgets.lost_s
        while True:
            try:
                return await client.update_weights(request, timeout_s=self._timeout_s)
            except RollwireError as error:
                text = f"{version_text(version)} to the rollout server at {client.target}: {error}"
                late = error.code is grpc.StatusCode.DEADLINE_EXCEEDED
                if relay is not None and (late or error.reason in _RELAY_FAULTS):
                    raise RelayError(f"cannot bring {text}") from error
                if late:
                    raise RunError(f"timeouts.update_s={self._timeout_s:g} was too short to bring {text}") from error
                if error.reason in _TRY_AGAIN:
                    if loop.time() >= end:
                        raise RunError(f"gave up bringing {text}") from error
                elif error.code in LOST_CODES:
                    raise ServerLostError(error.message) from error
                elif error.reason == Reason.UNKNOWN_VERSION:
                    raise UnknownVersionError(f"cannot bring {text}") from error
                else:
                    raise RunError(f"cannot bring {text}") from error
            await asyncio.sleep(self._budgets.poll_s)
