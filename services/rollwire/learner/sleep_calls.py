"""Sleep and Wake end to end: one transition at a time, never beside a step. The states are in `sleep_states.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollwire.learner.sleep_states import SleepStates
from rollwire.learner.torch_thread import TorchThread
from rollwire.learner.trainer import Trainer
from rollwire.learner.training import Training
from rollwire.learner.training_calls import Claim
from rollwire.serving.fencing import Fencing
from rollwire.serving.logs import get_logger
from rollwire.v1 import learner_pb2

_log = get_logger(__name__)
_Result = TypeVar("_Result")


class SleepCalls:
    """Answers calls of Sleep and Wake. A transition that has begun goes on when the caller goes away.

    Args:
        trainer: What sleeps.
        training: Knows which step runs.
        fencing: Refuses coordinators that were replaced.
        torch_thread: Where all torch work runs.

    Attributes:
        states: Whether the learner can compute.
    """

    def __init__(self, trainer: Trainer, training: Training, fencing: Fencing, torch_thread: TorchThread) -> None:
        self.states = SleepStates()
        self._trainer = trainer
        self._training = training
        self._fencing = fencing
        self._torch_thread = torch_thread
        self._one = asyncio.Lock()
        self._freed_bytes = 0
        self._claim: Claim | None = None
        self._running: set[asyncio.Task[Any]] = set()

    async def sleep(self, request: learner_pb2.LearnerServiceSleepRequest) -> learner_pb2.LearnerServiceSleepResponse:
        """Answers `LearnerService.Sleep`. Raises `RollwireError` as the contract says."""
        self._fencing.admit(request.fence)
        freed = await self._to_the_end(self._sleep())
        return learner_pb2.LearnerServiceSleepResponse(freed_bytes=freed)

    async def wake(self, request: learner_pb2.LearnerServiceWakeRequest) -> learner_pb2.LearnerServiceWakeResponse:
        """Answers `LearnerService.Wake`. Raises `RollwireError` as the contract says."""
        self._fencing.admit(request.fence)
        await self._to_the_end(self._wake())
        return learner_pb2.LearnerServiceWakeResponse()

    async def _sleep(self) -> int:
        async with self._one:
            if self._claim is None:
                # Held until it wakes: a batch that is being sent when it falls asleep must not be trained.
                self._claim = self._training.calls.hold("the learner is asleep")
                self._freed_bytes = 0
            if not self.states.fall_asleep():
                return self._freed_bytes
            try:
                self._freed_bytes += await self._torch_thread.run(self._trainer.sleep)
                self.states.ended()
            except BaseException:
                self.states.failed()
                raise
            _log.info("asleep", freed_bytes=self._freed_bytes)
            return self._freed_bytes

    async def _wake(self) -> None:
        async with self._one:
            if not self.states.wake():
                return
            try:
                await self._torch_thread.run(self._trainer.wake)
                self.states.ended()
            except BaseException:
                self.states.failed()
                raise
            assert self._claim is not None
            self._training.calls.release(self._claim)
            self._claim = None
            _log.info("awake")

    async def _to_the_end(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # the caller may be gone
        return await asyncio.shield(task)
