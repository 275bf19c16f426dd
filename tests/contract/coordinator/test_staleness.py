"""Runs with `max_staleness` above 0: rollouts go on while the learner trains, within the bound (I5)."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from typing import Any

import pytest

from rollwire.coordinator.errors import RunError
from rollwire.v1 import trajectory_pb2


def trained_lags(world: Any) -> list[int]:
    """For every trained trajectory, by how many versions its tokens lagged, as the ledger has it."""
    with sqlite3.connect(world.run_dir.path / "run.db") as connection:
        rows = connection.execute(
            "SELECT version_before, record FROM steps JOIN step_trajectories USING (lineage, step) "
            "JOIN trajectories USING (trajectory_id)"
        ).fetchall()
    return [
        version - trajectory_pb2.Trajectory.FromString(record).sequences[0].version_spans[0].version.step
        for version, record in rows
    ]


@pytest.mark.parametrize("staleness", [1, 2])
async def test_nothing_older_than_the_bound_is_trained(two_rollouts: Any, staleness: int) -> None:
    world = two_rollouts
    delays = random.Random(staleness)

    async def wait(request: Any) -> None:
        await asyncio.sleep(delays.random() * 0.03)

    for rollout in world.rollouts:
        rollout.before_group = wait
    await world.run(f"max_staleness={staleness}", "run.max_steps=12", "validation.every_steps=0")
    lags = trained_lags(world)
    assert len(lags) == 48
    assert set(lags) <= set(range(staleness + 1))
    assert max(lags) > 0, "rollouts did not wait for the learner"
    assert max(metrics["staleness/max"] for _, metrics in world.notes.steps) == max(lags)
    requests = [request for rollout in world.rollouts for request in rollout.requests if request.group_id[0] == "g"]
    assert not any(request.HasField("required_version") for request in requests)


async def test_groups_are_played_while_the_learner_trains(world: Any) -> None:
    expected = [4, 6, 6]
    during_training: list[int] = []

    def played() -> int:
        return len([request for request in world.rollout.requests if request.group_id[0] == "g"])

    async def count() -> None:
        async with asyncio.timeout(30):
            while played() < expected[len(during_training)]:
                await asyncio.sleep(0.005)
        during_training.append(played())

    train = world.learner.Train

    async def slow(iterator: Any, context: Any) -> Any:
        await count()
        return await train(iterator, context)

    world.learner.Train = slow
    await world.hosts[world.learner].stop()
    await world.hosts[world.learner].start()
    await world.run("max_staleness=1", "validation.episodes=0")
    assert during_training == expected and played() == 6, "one step ahead, and never beyond the last step"


async def test_without_staleness_nothing_is_played_while_the_learner_trains(world: Any) -> None:
    running: list[int] = []
    world.learner.before_train = lambda: running.append(world.rollout.in_flight)
    await world.run()
    assert running == [0, 0, 0]


async def test_a_server_that_plays_with_old_weights_is_not_trained_on(world: Any) -> None:
    world.rollout.plays_with = lambda: max(0, world.rollout.version.step - 3)
    with pytest.raises(RunError, match=r"groups in a row failed.*was older than max_staleness"):
        await world.run("max_staleness=1", "run.max_steps=6", "validation.episodes=0")
    assert max(trained_lags(world)) <= 1
    with sqlite3.connect(world.run_dir.path / "run.db") as connection:
        assert connection.execute("SELECT COUNT(*) FROM groups WHERE state = 'stale'").fetchone()[0] > 4


async def test_tokens_of_a_version_that_does_not_exist_end_the_run(world: Any) -> None:
    world.rollout.plays_with = lambda: 7
    with pytest.raises(RunError, match="has tokens of version line@7; the run trains line and its newest version is 0"):
        await world.run("validation.episodes=0")
