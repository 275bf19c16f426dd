"""The first version that a rollout server gets is read back from its engine before anything is played with it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from rollwire.coordinator.errors import RunError
from rollwire.rpc.errors import Reason, RollwireError

CORRUPT = RollwireError(
    grpc.StatusCode.DATA_LOSS, Reason.WEIGHTS_CORRUPT, "the engine holds digest abcd…, but line@0 was loaded with 1234…"
)


def raising(*errors: RollwireError | None) -> Any:
    """Returns a fault that raises one error after the other, then none; None lets a call pass."""
    left = list(errors)

    def fault() -> None:
        error = left.pop(0) if left else None
        if error is not None:
            raise error

    return fault


async def test_version_0_is_pushed_and_checked_before_any_rollout(two_rollouts: Any) -> None:
    world = two_rollouts
    await world.run()
    for rollout in world.rollouts:
        assert rollout.log[:3] == ["update 0", "check 0", "play"]
        assert rollout.checks == [0], "later versions are compared by the server itself"
        assert rollout.updates == [0, 1, 2, 3]


async def test_an_engine_that_holds_other_weights_stops_the_run_before_any_rollout(two_rollouts: Any) -> None:
    world = two_rollouts
    world.rollouts[1].check_fault = raising(CORRUPT)
    with pytest.raises(RunError) as caught:
        await world.run()
    text = str(caught.value)
    assert world.hosts[world.rollouts[1]].address in text
    assert "does not hold the weights that it was sent" in text and "abcd…" in text and "rollwire selftest" in text
    assert len(text.splitlines()) == 1
    assert [rollout.requests for rollout in world.rollouts] == [[], []]
    assert world.learner.steps == []


async def test_a_digest_that_is_not_the_learners_stops_the_run(world: Any) -> None:
    activated = world.rollout.digest_of
    world.rollout.check_fault = lambda: setattr(world.rollout, "digest_of", lambda step: b"x" * 32)
    with pytest.raises(RunError, match="but the learner published line@0"):
        await world.run()
    assert activated(0) != b"x" * 32 and world.rollout.requests == []


async def test_a_check_waits_for_an_update_in_progress(world: Any) -> None:
    busy = RollwireError(grpc.StatusCode.ABORTED, Reason.UPDATE_IN_PROGRESS, "being staged")
    world.rollout.check_fault = raising(busy, busy)
    summary = await world.run()
    assert (summary.steps, world.rollout.checks) == (3, [0])


async def test_a_server_that_does_not_know_the_method_is_named(world: Any) -> None:
    world.rollout.check_fault = raising(RollwireError(grpc.StatusCode.UNIMPLEMENTED, Reason.INTERNAL, "no such method"))
    with pytest.raises(RunError, match="cannot check its weights"):
        await world.run()


async def test_a_server_that_was_restarted_is_checked_again(two_rollouts: Any) -> None:
    world = two_rollouts
    rollout = world.rollouts[1]

    async def restart() -> None:
        await world.hosts[rollout].stop()
        rollout.version.Clear()
        while not any("was lost" in text for text in world.notes.notices):
            await asyncio.sleep(0.01)
        await world.hosts[rollout].start()

    restarting: list[asyncio.Task[None]] = []

    def at_step(step: int) -> None:
        if step == 0:
            restarting.append(asyncio.get_running_loop().create_task(restart()))

    world.notes.at_step = at_step
    await world.run("run.max_steps=60")
    await asyncio.gather(*restarting)
    assert len(rollout.checks) == 2 and rollout.checks[0] == 0 < rollout.checks[1]
    again = rollout.log.index(f"check {rollout.checks[1]}")
    assert rollout.log[again - 1] == f"update {rollout.checks[1]}"


async def test_tensors_that_cannot_be_read_back_are_mentioned(world: Any) -> None:
    world.rollout.unverified = ["model.layers.0.experts.w13"]
    await world.run()
    assert any("1 of 3 tensors cannot be read back" in text and "w13" in text for text in world.notes.notices)
