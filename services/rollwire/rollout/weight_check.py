"""Reads the weights back from the engine and compares them with what was verified when they were loaded.

Memory can change without any update: a kernel that writes out of bounds, a loader that keeps a second copy, a device
that loses bits. What then plays is a policy that nobody trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from rollwire.rollout.policy import Hold, Policy, no_weights
from rollwire.rollout.weight_states import Phase, Served
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.versions import version_text
from rollwire.serving.logs import get_logger

_log = get_logger(__name__)


@dataclass(frozen=True)
class Checked:
    """Weights that are what they should be.

    Attributes:
        served: Version, and digest as just computed.
        tensors: Number of tensors of the model.
        unverified: Names of those that the engine cannot give back.
    """

    served: Served
    tensors: int
    unverified: Sequence[str]


class WeightChecker:
    """Checks the weights of one policy, once at a time; a caller that comes meanwhile gets the same result.

    Args:
        policy: Whose weights.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._task: asyncio.Task[Checked] | None = None

    async def check(self) -> Checked:
        """Compares; when the engine holds something else nothing serves any more, and what runs is aborted.

        Generations that run wait in the engine meanwhile; others do not start.

        Raises:
            RollwireError: As `RolloutService.CheckWeights` says.
        """
        policy = self._policy
        policy.sleep.require_awake("CheckWeights again")
        if policy.states.staging is not None:
            raise _updating()
        served = policy.states.active
        if served is None:
            raise no_weights()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._compare(served))
            # When every caller has gone away nobody else looks at how it ended; it is logged.
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._task)

    async def close(self) -> None:
        """Ends a check in progress."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _compare(self, served: Served) -> Checked:
        policy = self._policy
        policy.close_gate(Hold.CHECK)
        try:
            held = await policy.engine.held_digest()
            if policy.states.active is not served or policy.states.phase is Phase.DRAINING:
                raise _updating()
            if held != served.digest:
                policy.states.discard()
                await policy.engine.abort_all()
                raise _corrupt(served, held)
        finally:
            policy.open_gate(Hold.CHECK)
        return Checked(served, len(policy.engine.layouts()), policy.engine.unverified)


def _updating() -> RollwireError:
    return RollwireError(
        grpc.StatusCode.ABORTED,
        Reason.UPDATE_IN_PROGRESS,
        "a version is being staged; call CheckWeights after that",
        retry_after_s=1.0,
    )


def _corrupt(served: Served, held: bytes) -> RollwireError:
    text = (
        f"the engine holds digest {held.hex()[:16]}…, but {version_text(served.version)} was loaded with "
        f"{served.digest.hex()[:16]}…; nothing is served until an update succeeds"
    )
    _log.error("the engine's weights changed without an update", version=version_text(served.version), error=text)
    return RollwireError(grpc.StatusCode.DATA_LOSS, Reason.WEIGHTS_CORRUPT, text)
