"""`placement: colocated`: learner and rollout servers take turns, and never use the device together."""

from __future__ import annotations

from typing import Any

import pytest

from rollwire.coordinator.errors import RunError
from rollwire.rpc.errors import Reason, exhausted, precondition
from rollwire.serving.config import load_config

COLOCATED = ("placement=colocated", "run.max_steps=2", "validation.episodes=0", "run.checkpoint_every_steps=1")


def shared_log(world: Any) -> list[str]:
    log: list[str] = []
    world.learner.log = log
    for rollout in world.rollouts:
        rollout.log = log
    return log


async def test_they_take_turns_and_the_device_is_free_before_the_other_takes_it(world: Any) -> None:
    log = shared_log(world)
    await world.run(*COLOCATED)
    turns = [entry for at, entry in enumerate(log) if entry != "play" or log[at - 1] != "play"]
    to_learner, to_rollout = ["rollout sleeps", "learner wakes"], ["learner sleeps", "rollout wakes"]
    assert turns == [
        *[*to_learner, "save 0", *to_rollout, "update 0", "check 0", "play"],
        *[*to_learner, "train 0", "save 1", "stage 1", *to_rollout, "update 1", "play"],
        *[*to_learner, "train 1", "stage 2", *to_rollout, "update 2"],
        *[*to_learner, "save 2"],
    ]


async def test_validation_is_the_rollout_servers_turn(world: Any) -> None:
    shared_log(world)
    await world.run("placement=colocated", "validation.greedy_at_end=true")
    assert [step for step, _, _ in world.notes.validations] == [0, 2, 3, 3]


async def test_separate_servers_are_never_put_to_sleep(world: Any) -> None:
    log = shared_log(world)
    await world.run("run.max_steps=2")
    assert not [entry for entry in log if "sleeps" in entry or "wakes" in entry or "stage" in entry]


async def test_waking_is_tried_again_until_the_memory_is_free(world: Any) -> None:
    log, refusals = shared_log(world), iter(range(3))

    def full() -> None:
        if next(refusals, None) is not None:
            raise exhausted(Reason.DEVICE_MEMORY_EXHAUSTED, "no room", 0.01)

    world.learner.wake_fault = full
    await world.run(*COLOCATED)
    assert next(refusals, None) is None
    assert log.count("learner wakes") == 4


async def test_a_server_that_cannot_sleep_ends_the_run_with_its_reason(world: Any) -> None:
    def disabled() -> None:
        raise precondition(Reason.SLEEP_DISABLED, "started without sleep mode")

    world.learner.wake_fault = disabled
    with pytest.raises(RunError, match=r"placement is colocated, but the learner at .* does not wake: .*sleep mode"):
        await world.run(*COLOCATED)


async def test_colocated_with_staleness_is_refused() -> None:
    with pytest.raises(Exception, match="placement is colocated, but max_staleness is 1"):
        load_config(None, ["placement=colocated", "max_staleness=1"])
