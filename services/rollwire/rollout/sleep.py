"""Sleep and Wake: frees the device's memory while a learner needs it. The states are in `sleep_states.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc
import torch

from rollwire.rollout.policy import Hold, Policy
from rollwire.rollout.sleep_states import DISCARD, Level, Step
from rollwire.rollout.weight_states import Served
from rollwire.rollout.weights import DRAIN_S
from rollwire.rpc.errors import Reason, RollwireError, exhausted, precondition
from rollwire.serving.logs import get_logger
from rollwire.v1 import rollout_pb2

_log = get_logger(__name__)
_MEMORY_RETRY_S: Final = 2.0
_CHECK_POLL_S: Final = 0.02


class Sleeper:
    """Carries out sleep and wake of one policy, one at a time.

    A caller that goes away does not stop a transition.

    Args:
        policy: Whose engine.
        drain_s: Time that running generations get to finish; then they are aborted, and episodes draw them again.
    """

    def __init__(self, policy: Policy, *, drain_s: float = DRAIN_S) -> None:
        self._policy = policy
        self._drain_s = drain_s
        self._freed_bytes = 0
        self._task: asyncio.Task[None] | None = None

    async def sleep(self, level: Level) -> int:
        """Frees the device's memory; returns how many bytes were given back since the server was awake.

        Args:
            level: `HOST` or `DISCARD`.

        Raises:
            RollwireError: As `RolloutService.Sleep` says.
        """
        policy = self._policy
        if disabled := policy.engine.description.sleep_disabled:
            raise precondition(Reason.SLEEP_DISABLED, disabled)
        await self._carry_out(
            lambda: policy.sleep.fall_asleep(level, staging=policy.states.staging is not None),
            lambda: self._fall_asleep(level),
        )
        return self._freed_bytes

    async def wake(self) -> Served | None:
        """Takes the device's memory again; returns what serves, None if an update must follow.

        Raises:
            RollwireError: As `RolloutService.Wake` says.
        """
        await self._carry_out(self._policy.sleep.wake, self._wake)
        return self._policy.states.active

    async def close(self) -> None:
        """Ends a transition in progress."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _carry_out(self, ask: Callable[[], Step], work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while (step := ask()) is Step.AFTER:
            assert self._task is not None
            await asyncio.wait([self._task])
        if step is Step.START:
            self._task = asyncio.create_task(work())
            # When the caller has gone away nobody else looks at how it ended; it is logged.
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(self._task)

    async def _fall_asleep(self, level: Level) -> None:
        policy = self._policy
        policy.close_gate(Hold.SLEEP)
        if level == DISCARD:
            policy.states.discard()
        with self._or_lost("falling asleep"):
            while Hold.CHECK in policy.holds:  # noqa: ASYNC110  # a check in progress; no other one begins
                await asyncio.sleep(_CHECK_POLL_S)
            await policy.make_way(Hold.SLEEP, rollout_pb2.PAUSE_MODE_WAIT, self._drain_s)
            self._freed_bytes += await policy.engine.sleep(level)
        policy.sleep.asleep()
        _log.info("asleep", level=rollout_pb2.SleepLevel.Name(level), freed_bytes=self._freed_bytes)

    async def _wake(self) -> None:
        policy = self._policy
        with self._or_lost("waking"):
            try:
                await policy.engine.wake()
            except torch.OutOfMemoryError as error:
                message = _one_line(error)
            else:
                message = ""
        if message:
            policy.sleep.stays_asleep()
            _log.warning("still asleep: the device's memory is not free", error=message)
            raise exhausted(
                Reason.DEVICE_MEMORY_EXHAUSTED,
                f"the device's memory is not free ({message}); the rollout server stays asleep: end what uses the "
                "device, or put it to sleep, and call Wake again",
                _MEMORY_RETRY_S,
            )
        policy.sleep.awakened()
        self._freed_bytes = 0
        policy.open_gate(Hold.SLEEP)
        _log.info("awake", serves=policy.states.active is not None)

    @contextmanager
    def _or_lost(self, doing: str) -> Iterator[None]:
        """Notes, when the work inside fails, that nobody knows what the engine holds."""
        try:
            yield
        except BaseException as error:
            self._policy.sleep.lost()
            self._policy.states.discard()
            _log.error("the weights are lost", doing=doing, exc_info=error)
            if isinstance(error, RollwireError) or not isinstance(error, Exception):
                raise
            raise RollwireError(
                grpc.StatusCode.INTERNAL,
                Reason.INTERNAL,
                f"{doing} failed with {type(error).__name__} ({_one_line(error)}); the weights are lost, call Wake and "
                "then UpdateWeights",
            ) from error


def _one_line(error: BaseException) -> str:
    """Returns the first line of an error's text; never empty."""
    lines = str(error).splitlines()
    return lines[0][:300] if lines and lines[0] else type(error).__name__
