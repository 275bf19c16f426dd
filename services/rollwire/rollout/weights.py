"""Weight updates: fetch beside the live weights, verify, prepare, shut the gate, make way, load, compare, open it.

Until loading begins any fault leaves the old version serving. The states are in `weight_states.py`; this shell does
the I/O.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

import grpc

from rollwire.client.weights import WeightsClient
from rollwire.rollout.policy import Hold, PauseMode, Policy
from rollwire.rollout.weight_states import Begin, Served
from rollwire.rpc.errors import Reason, RollwireError, exhausted
from rollwire.rpc.memory_file import HostMemoryError
from rollwire.rpc.same_host import SameHostOffer
from rollwire.rpc.versions import version_text
from rollwire.rpc.weight_buffers import HostBuffers
from rollwire.rpc.weight_delta import supported_encodings
from rollwire.rpc.weight_low_rank import LowRankBases
from rollwire.rpc.weight_relay import WeightRelay
from rollwire.rpc.weight_stream import HeldWeights, WeightAssembler, receive_weights
from rollwire.serving.logs import get_logger
from rollwire.v1 import rollout_pb2, weights_pb2

_log = get_logger(__name__)
DRAIN_S: Final = 10.0
"""Time that running generations get to finish; then they are aborted, and episodes draw those turns again."""
_AGAIN: Final = "UpdateWeights again"
_MEMORY_RETRY_S: Final = 5.0
_PUBLISHING_POLL_S: Final = 0.2
"""Pause before a source that is publishing is asked again."""
# Errors of the source that a reader of this server's errors can act on; others mean that it cannot be used.
_PASSED_ON: Final = (Reason.UNKNOWN_VERSION, Reason.WEIGHTS_CORRUPT, Reason.WEIGHTS_MISMATCH)


@dataclass(frozen=True)
class Update:
    """An activated version.

    Attributes:
        served: Version and digest.
        received_bytes: Payload fetched.
        fetch_s: Time from the request to verified host memory.
        pause_s: Time during which no generation was admitted.
    """

    served: Served
    received_bytes: int = 0
    fetch_s: float = 0.0
    pause_s: float = 0.0


class WeightUpdater:
    """Carries out updates of one policy, one at a time.

    The active version stays in host memory, so that the next one can arrive as changes to it; while an update is in
    progress a second buffer holds the new one. Both are used again from update to update. The first two updates touch
    them for the first time and take longer. While the engine sleeps an update ends in host memory. The changes that
    came are kept too, for other servers: see `relay`. With adapters one more copy of the adapted tensors is kept,
    as they were before training.

    Args:
        policy: Whose weights.
        drain_s: Time that running generations get to finish.
        buffers: Where the memory comes from; by default private memory.
        same_host: Let a source on this host hand over a file instead of sending the version.

    Attributes:
        relay: Passes the active version on.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        drain_s: float = DRAIN_S,
        buffers: HostBuffers | None = None,
        same_host: bool = True,
    ) -> None:
        self._policy = policy
        self._same_host = same_host
        self._buffers = buffers if buffers is not None else HostBuffers()
        self._held: HeldWeights | None = None
        self._bases = LowRankBases()
        self._ready: HeldWeights | None = None
        self.relay = WeightRelay()
        self._drain_s = drain_s
        self._task: asyncio.Task[Update] | None = None

    async def update(
        self,
        version: weights_pb2.WeightVersion,
        target: str,
        timeout_s: float,
        mode: PauseMode = rollout_pb2.PAUSE_MODE_WAIT,
    ) -> Update:
        """Activates a version.

        A caller that goes away does not stop the update; one that asks for the same version joins it.

        Args:
            version: Version wanted.
            target: `host:port` of a learner or rollout server that has it.
            timeout_s: Longest time for fetching.
            mode: What happens to generations that run when the version is ready; who joins an update takes its mode.

        Raises:
            RollwireError: As `RolloutService.UpdateWeights` says.
        """
        states = self._policy.states
        begin = states.begin(version)
        if begin is Begin.ALREADY_ACTIVE:
            self._policy.sleep.require_awake(_AGAIN)
            assert states.active is not None
            return Update(states.active)
        if begin is Begin.START:
            self._task = asyncio.create_task(self._carry_out(version, target, timeout_s, mode))
            # When every caller has gone away nobody else looks at how it ended; it is logged.
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        assert self._task is not None
        return await asyncio.shield(self._task)

    async def close(self) -> None:
        """Ends an update in progress."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _carry_out(
        self, version: weights_pb2.WeightVersion, target: str, timeout_s: float, mode: PauseMode
    ) -> Update:
        start_s = time.monotonic()
        states = self._policy.states
        try:
            held, received_bytes = await self._obtain(version, target, timeout_s)
            fetched_s = time.monotonic()
            self._keep_while_asleep(held)
            states.verified(version)
            served, pause_s = await self._swap_or_release(held, mode)
        except BaseException as error:
            states.failed(version)
            serving = version_text(states.active.version) if states.active is not None else "nothing"
            _log.warning("weight update failed", version=version_text(version), still_serving=serving, error=str(error))
            raise
        update = Update(served, received_bytes, fetched_s - start_s, pause_s)
        _log.info(
            "weights active",
            version=version_text(version),
            digest=served.digest.hex()[:16],
            received_bytes=update.received_bytes,
            fetch_s=round(update.fetch_s, 4),
            pause_s=round(pause_s, 4),
        )
        return update

    async def _obtain(
        self, version: weights_pb2.WeightVersion, target: str, timeout_s: float
    ) -> tuple[HeldWeights, int]:
        """Returns the verified weights and how many bytes arrived: none if they are in host memory already."""
        ready, self._ready = self._ready, None
        if ready is not None:
            if ready.version == version:
                return ready, 0
            ready.release()
        if self._held is not None and self._held.version == version:
            # The engine has dropped them, or failed to load others.
            return self._held, 0
        return await self._fetch(version, target, timeout_s)

    def _keep_while_asleep(self, held: HeldWeights) -> None:
        """Keeps the weights for later and refuses to go on if the engine sleeps."""
        if not self._policy.sleep.awake and held is not self._held:
            self._ready = held
        self._policy.sleep.require_awake(_AGAIN)

    async def _fetch(
        self, version: weights_pb2.WeightVersion, target: str, timeout_s: float
    ) -> tuple[HeldWeights, int]:
        """Receives and verifies the version; returns the weights and how many bytes arrived.

        Asks for changes to what is held, and otherwise for the version as a file, if the source is on this host. When
        what comes does not fit, the whole version is fetched; while the source is publishing, it is asked again until
        the time is over.
        """
        end_s = time.monotonic() + timeout_s
        base, same_host, received_bytes = self._held, self._same_host, 0
        async with WeightsClient(target) as source:
            while True:
                left_s = max(end_s - time.monotonic(), 0.0)
                with SameHostOffer(enabled=same_host) as offer:
                    assembler = WeightAssembler(
                        self._policy.engine.layouts(),
                        version,
                        base=base,
                        buffers=self._buffers,
                        keep_changes=True,
                        low_rank_bases=self._bases,
                        take_file=offer.take,
                    )
                    request = weights_pb2.FetchWeightsRequest(
                        version=version,
                        have=base.version if base is not None else None,
                        accepted_encodings=supported_encodings(),
                        same_host_socket=offer.name,
                        low_rank_bases=self._bases.digest if base is not None else b"",
                    )
                    try:
                        held = await receive_weights(source.fetch_weights(request, timeout_s=left_s), assembler)
                        return held, received_bytes + assembler.received_bytes
                    except HostMemoryError as full:
                        message = f"{version_text(version)} was not fetched: {full}"
                        raise exhausted(Reason.HOST_MEMORY_EXHAUSTED, message, _MEMORY_RETRY_S) from full
                    except RollwireError as caught:
                        error = caught
                received_bytes += assembler.received_bytes
                if assembler.copied and error.reason == Reason.WEIGHTS_CORRUPT:
                    # Most likely the source has gone on to another version and overwritten this one.
                    _log.warning("weights handed over on this host did not fit; fetching them", error=error.message)
                    same_host = False
                elif error.reason == Reason.WEIGHTS_CORRUPT and base is not None:
                    _log.warning("changed weights did not fit; fetching all", error=error.message)
                    base = None
                elif error.reason == Reason.WEIGHT_SOURCE_UNAVAILABLE and left_s > _PUBLISHING_POLL_S:
                    await asyncio.sleep(_PUBLISHING_POLL_S)
                elif error.reason in _PASSED_ON:
                    raise error
                else:
                    raise _unusable(version, target, received_bytes, error) from error

    async def _swap_or_release(self, held: HeldWeights, mode: PauseMode) -> tuple[Served, float]:
        """Swaps, and holds what then serves instead of what served before; on any failure that stays held."""
        try:
            await self._policy.engine.stage_weights(held.version, held.tensors, held.tensor_digests)
            swapped = await self._swap(held, mode)
        except BaseException:
            if held is not self._held:
                held.release()
            raise
        if held is not self._held:
            before, self._held = self._held, held
            self.relay.hold(held)
            if before is not None:
                before.release()
        return swapped

    async def _swap(self, held: HeldWeights, mode: PauseMode) -> tuple[Served, float]:
        """Replaces the engine's weights while nothing generates; returns what serves and how long the gate was shut."""
        policy = self._policy
        closed_s = time.monotonic()
        policy.states.prepared(held.version)
        policy.close_gate(Hold.UPDATE)
        try:
            await policy.make_way(Hold.UPDATE, mode, self._drain_s)
            policy.states.drained(held.version)
            digest = await policy.engine.load_weights(held.version, held.tensors, held.tensor_digests)
            served = policy.states.loaded(held.version, digest, held.digest)
        finally:
            policy.open_gate(Hold.UPDATE)
        return served, time.monotonic() - closed_s


def _unusable(
    version: weights_pb2.WeightVersion, target: str, received_bytes: int, error: RollwireError
) -> RollwireError:
    return RollwireError(
        grpc.StatusCode.UNAVAILABLE,
        Reason.WEIGHT_SOURCE_UNAVAILABLE,
        f"fetching {version_text(version)} from {target} failed after {received_bytes} bytes: {error.message}",
        metadata={"target": target},
        retry_after_s=1.0,
    )
