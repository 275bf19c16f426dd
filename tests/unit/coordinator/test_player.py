from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rollwire.coordinator.budgets import Budgets
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.groups import Tally
from rollwire.coordinator.planner import Planner
from rollwire.coordinator.player import GroupPlayer
from rollwire.rpc.errors import Reason, exhausted
from rollwire.serving.config import load_config
from rollwire.v1 import rollout_pb2, trajectory_pb2

Maker = Callable[..., trajectory_pb2.Trajectory]
TIMEOUT_S = 0.05


class _Server:
    """A pool of one server: it has a place late, and refuses the first requests."""

    target = "127.0.0.1:1"

    def __init__(self, make: Maker, refusals: int, place_s: float = 0.0) -> None:
        self.client = self
        self.asked = 0
        self._make = make
        self._refusals = refusals
        self._place_s = place_s

    async def acquire(self, episodes: int, avoid: object) -> _Server:
        await asyncio.sleep(self._place_s)
        return self

    def release(self, server: _Server, episodes: int) -> None:
        """Nothing is counted."""

    async def run_group(
        self, request: rollout_pb2.RunGroupRequest, timeout_s: float
    ) -> AsyncIterator[rollout_pb2.RunGroupResponse]:
        self.asked += 1
        if self.asked <= self._refusals:
            raise exhausted(Reason.EPISODES_EXHAUSTED, "full", 0.01)
        for index in request.episode_indices:
            yield rollout_pb2.RunGroupResponse(trajectory=self._make(request.group_id, index))


async def _play(server: _Server) -> tuple[Any, Tally]:
    plan = Planner(load_config(None, ["batch.episodes_per_group=2"])).training_group(0)
    pool: Any = server
    player = GroupPlayer(pool, trajectory_pb2.Fence(), TIMEOUT_S, Budgets(poll_s=0.01), lambda: None)
    tally = Tally()
    return await asyncio.wait_for(player.play(plan, tally, None), 30), tally


async def test_a_long_wait_for_a_place_is_not_taken_for_a_server_without_room(make_trajectory: Maker) -> None:
    server = _Server(make_trajectory, refusals=1, place_s=3 * TIMEOUT_S)
    progress, tally = await _play(server)
    assert progress.complete and server.asked == 2
    assert (tally.requested, tally.completed, tally.failed.total()) == (2, 2, 0)


async def test_a_server_that_never_has_room_ends_the_run(make_trajectory: Maker) -> None:
    server = _Server(make_trajectory, refusals=10_000)
    with pytest.raises(RunError, match=r"had no room for 2 episodes during timeouts.group_s=0.05 s; is another run"):
        await _play(server)
    assert server.asked > 1
