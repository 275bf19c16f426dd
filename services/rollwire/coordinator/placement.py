"""Whose turn it is where rollout servers and learner share devices (`placement: colocated`).

    learner's turn:  rollout servers sleep, the learner is awake    scoring, training, checkpoints; weights are staged
    rollout's turn:  the learner sleeps, rollout servers are awake  weights are loaded; training and validation episodes

Asking for a turn that it is already costs nothing. Who gives the device up is asked first, always.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto
from typing import Final, Protocol

from rollwire.client.learner import LearnerClient
from rollwire.client.rollout import RolloutClient
from rollwire.coordinator.budgets import Budgets
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.rollout_pool import RolloutPool, RolloutServer, ServerState
from rollwire.coordinator.tasks import run_all
from rollwire.coordinator.weight_push import LOST_CODES
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import learner_pb2, rollout_pb2, trajectory_pb2, weights_pb2

_BUSY: Final = (Reason.UPDATE_IN_PROGRESS, Reason.STEP_IN_PROGRESS, Reason.DEVICE_MEMORY_EXHAUSTED)


class Placement(Protocol):
    """Gives the devices to whoever works next."""

    colocated: bool

    async def learner(self) -> None:
        """Makes it the learner's turn."""

    async def rollout(self) -> bool:
        """Makes it the rollout servers' turn; True if they must be brought the present version."""

    async def stage(self, version: weights_pb2.WeightVersion) -> None:
        """Lets rollout servers fetch a version while it is the learner's turn."""


class Separate:
    """Everybody has devices of their own and is always awake."""

    colocated = False

    async def learner(self) -> None:
        """Does nothing."""

    async def rollout(self) -> bool:
        """Does nothing."""
        return False

    async def stage(self, version: weights_pb2.WeightVersion) -> None:
        """Does nothing: weights are fetched when they are pushed."""


class _Turn(Enum):
    LEARNER = auto()
    ROLLOUT = auto()


class Colocated:
    """Alternates between them.

    Rollout servers drop their weights when they sleep: they keep them in host memory anyway, to receive changes, and
    load a version after each waking.

    Args:
        client: The learner.
        pool: The rollout servers.
        fence: Identifies this coordinator.
        timeout_s: Longest time of one update, and of falling asleep or waking.
        budgets: Bounds of retries.
    """

    colocated = True

    def __init__(
        self,
        client: LearnerClient,
        pool: RolloutPool,
        fence: trajectory_pb2.Fence,
        timeout_s: float,
        budgets: Budgets,
    ) -> None:
        self._learner = client
        self._pool = pool
        self._fence = fence
        self._timeout_s = timeout_s
        self._budgets = budgets
        self._turn: _Turn | None = None  # unknown at first: an earlier coordinator may have left anything

    async def learner(self) -> None:
        """See `Placement`. Raises `RunError` when somebody refuses or stays away."""
        if self._turn is _Turn.LEARNER:
            return
        self._turn = None
        request = rollout_pb2.SleepRequest(fence=self._fence, level=rollout_pb2.SLEEP_LEVEL_DISCARD)
        await self._each_rollout(lambda client: client.sleep(request, timeout_s=self._timeout_s), "fall asleep")
        wake = learner_pb2.LearnerServiceWakeRequest(fence=self._fence)
        await self._ask_learner(lambda: self._learner.wake(wake, timeout_s=self._timeout_s), "wake")
        self._turn = _Turn.LEARNER

    async def rollout(self) -> bool:
        """See `Placement`. Raises `RunError` when somebody refuses or stays away."""
        if self._turn is _Turn.ROLLOUT:
            return False
        self._turn = None
        sleep = learner_pb2.LearnerServiceSleepRequest(fence=self._fence)
        await self._ask_learner(lambda: self._learner.sleep(sleep, timeout_s=self._timeout_s), "fall asleep")
        request = rollout_pb2.WakeRequest(fence=self._fence)
        await self._each_rollout(lambda client: client.wake(request, timeout_s=self._timeout_s), "wake")
        self._turn = _Turn.ROLLOUT
        return True

    async def stage(self, version: weights_pb2.WeightVersion) -> None:
        """See `Placement`. What fails here is fetched when the version is pushed."""
        assert self._turn is _Turn.LEARNER
        source = weights_pb2.WeightSource(target=self._learner.target)
        request = rollout_pb2.UpdateWeightsRequest(fence=self._fence, version=version, source=source)

        async def fetch(server: RolloutServer) -> None:
            try:
                await server.client.update_weights(request, timeout_s=self._timeout_s)
            except (
                RollwireError
            ):  # ASLEEP when it has the version in host memory; anything else comes again with the push
                return

        await run_all(fetch(server) for server in self._present())

    def _present(self) -> Sequence[RolloutServer]:
        return [server for server in self._pool.servers if server.state is ServerState.READY]

    async def _each_rollout(self, call: Callable[[RolloutClient], Awaitable[object]], what: str) -> None:
        async def ask(server: RolloutServer) -> None:
            try:
                await self._retry(lambda: call(server.client), f"the rollout server at {server.client.target}", what)
            except _LostError as lost:
                self._pool.report_lost(server, str(lost))

        await run_all(ask(server) for server in self._present())

    async def _ask_learner(self, call: Callable[[], Awaitable[object]], what: str) -> None:
        who = f"the learner at {self._learner.target}"
        loop = asyncio.get_running_loop()
        end = loop.time() + self._budgets.lost_s
        while True:
            try:
                return await self._retry(call, who, what)
            except _LostError as lost:
                if loop.time() >= end:
                    raise RunError(f"{who} was lost for more than {self._budgets.lost_s:g} s ({lost})") from lost
            await asyncio.sleep(self._budgets.poll_s)

    async def _retry(self, call: Callable[[], Awaitable[object]], who: str, what: str) -> None:
        """Asks until it is done; gives up when the reason not to do it lasts."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._budgets.lost_s
        while True:
            try:
                await call()
                return
            except RollwireError as error:
                if error.code in LOST_CODES:
                    raise _LostError(error.message) from error
                if error.reason not in _BUSY or loop.time() >= end:
                    raise RunError(f"placement is colocated, but {who} does not {what}: {error}") from error
            await asyncio.sleep(self._budgets.poll_s)


class _LostError(Exception):
    """A server does not answer."""
