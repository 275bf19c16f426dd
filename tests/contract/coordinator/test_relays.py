"""Bringing versions to many servers: few read from the learner, the others from each other, faults fall back."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
import pytest

from rollwire.coordinator.errors import RunError
from rollwire.coordinator.fan_out import READERS_PER_SOURCE
from rollwire.rpc.errors import Reason, RollwireError, not_found
from rollwire.v1 import rollout_pb2


class Fleet:
    """Makes the fake servers of a world fetch from where they are told, and writes down what happens."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.learner = world.hosts[world.learner].address
        self.by_address = {world.hosts[rollout].address: rollout for rollout in world.rollouts}
        self.reading: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.sources: dict[int, list[str]] = {}
        self.relay_error: Exception | None = None
        self.learner_knows = True
        for rollout in world.rollouts:
            rollout.fetch = self._fetch

    async def _fetch(self, rollout: Any, request: rollout_pb2.UpdateWeightsRequest) -> None:
        target = request.source.target
        self.sources.setdefault(request.version.step, []).append(target)
        self.reading[target] += 1
        self.most[target] = max(self.most[target], self.reading[target])
        await asyncio.sleep(0.02)
        self.reading[target] -= 1
        if target == self.learner:
            if not self.learner_knows:
                raise not_found(Reason.UNKNOWN_VERSION, "the learner has another one")
            return
        assert target != self.world.hosts[rollout].address, "a server is its own source"
        assert self.by_address[target].version == request.version, "a source does not hold the version"
        if self.relay_error is not None:
            raise self.relay_error


@pytest.fixture
def fleet(many_rollouts: Any) -> Fleet:
    """A run with eleven servers."""
    return Fleet(many_rollouts)


async def test_the_learner_serves_a_few_and_servers_serve_each_other(fleet: Fleet) -> None:
    await fleet.world.run("validation.episodes=0", "run.max_steps=2")
    servers = len(fleet.world.rollouts)
    for rollout in fleet.world.rollouts:
        assert rollout.updates == [0, 1, 2]
    for sources in fleet.sources.values():
        assert len(sources) == servers
        assert READERS_PER_SOURCE <= sources.count(fleet.learner) < servers
    assert max(fleet.most.values()) <= READERS_PER_SOURCE
    assert fleet.world.notes.notices == []


@pytest.mark.parametrize(
    "error",
    [
        RollwireError(grpc.StatusCode.UNAVAILABLE, Reason.WEIGHT_SOURCE_UNAVAILABLE, "gone", retry_after_s=0.01),
        RollwireError(grpc.StatusCode.DATA_LOSS, Reason.WEIGHTS_CORRUPT, "checksum"),
        RollwireError(grpc.StatusCode.NOT_FOUND, Reason.UNKNOWN_VERSION, "replaced"),
    ],
    ids=["gone", "damaged", "replaced"],
)
async def test_what_a_relay_cannot_give_comes_from_the_learner(fleet: Fleet, error: RollwireError) -> None:
    fleet.relay_error = error
    await fleet.world.run("validation.episodes=0", "run.max_steps=1")
    for rollout in fleet.world.rollouts:
        assert rollout.updates == [0, 1]
    for sources in fleet.sources.values():
        assert sources.count(fleet.learner) == len(fleet.world.rollouts)
        assert len(sources) > len(fleet.world.rollouts)
    assert any("fetching from the learner instead of" in notice for notice in fleet.world.notes.notices)


async def test_a_version_that_the_learner_does_not_have_ends_the_run(fleet: Fleet) -> None:
    fleet.learner_knows = False
    with pytest.raises(RunError, match=r"cannot bring line@0 to the rollout server at .*UNKNOWN_VERSION"):
        await fleet.world.run("validation.episodes=0")


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
async def test_every_update_asks_for_the_configured_pause_mode(fleet: Fleet, mode: str) -> None:
    asked: list[int] = []

    async def fetch(rollout: Any, request: rollout_pb2.UpdateWeightsRequest) -> None:
        asked.append(request.pause_mode)

    for rollout in fleet.world.rollouts:
        rollout.fetch = fetch
    await fleet.world.run("validation.episodes=0", "run.max_steps=1", f"rollout.pause_mode={mode}")
    assert asked == [rollout_pb2.PauseMode.Value(f"PAUSE_MODE_{mode.upper()}")] * 2 * len(fleet.world.rollouts)
