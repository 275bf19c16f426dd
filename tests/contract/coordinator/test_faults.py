"""What goes wrong: failed episodes, lost servers, refused weights. A fault never becomes a reward (I9)."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from typing import Any

import grpc
import pytest

from rollwire.coordinator.errors import RunError
from rollwire.rpc.errors import Reason, RollwireError, exhausted, invalid_field, precondition
from rollwire.serving.config import ConfigError
from rollwire.v1 import coordinator_pb2, trajectory_pb2, weights_pb2


def query(world: Any, text: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(world.run_dir.path / "run.db") as connection:
        return connection.execute(text).fetchall()


def failure(message: str = "boom") -> trajectory_pb2.EpisodeFailure:
    return trajectory_pb2.EpisodeFailure(reason=trajectory_pb2.FAILURE_REASON_ENVIRONMENT_ERROR, message=message)


def unavailable(message: str = "gone") -> RollwireError:
    return RollwireError(grpc.StatusCode.UNAVAILABLE, Reason.DRAINING, message)


class Once:
    """Raises an error at the n-th call only."""

    def __init__(self, error: Exception, call: int = 1) -> None:
        self.error, self.call, self.calls = error, call, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.call:
            raise self.error


async def test_failed_episodes_are_played_again_until_their_group_is_whole(world: Any) -> None:
    """I6: a group trains complete."""
    play = world.rollout.play
    world.rollout.play = lambda request, episode: (
        failure()
        if request.group_id == "g00000001" and episode == 1 and request.attempt < 2
        else play(request, episode)
    )
    await world.run()
    attempts = [request for request in world.rollout.requests if request.group_id == "g00000001"]
    assert [(request.attempt, list(request.episode_indices)) for request in attempts] == [
        (0, [0, 1]),
        (1, [1]),
        (2, [1]),
    ]
    assert query(world, "SELECT episode_index, attempt FROM trajectories WHERE group_id = 'g00000001' ORDER BY 1") == [
        (0, 0),
        (1, 2),
    ]
    assert query(world, "SELECT group_id, episode_index, attempt, reason FROM failures") == [
        ("g00000001", 1, 0, "environment_error"),
        ("g00000001", 1, 1, "environment_error"),
    ]
    last = world.notes.steps[-1][1]
    assert (
        last["scheduler/requested"] == 14 == last["scheduler/completed"] + last["scheduler/failures/environment_error"]
    )


async def test_a_group_that_keeps_failing_is_replaced_and_never_trained(world: Any) -> None:
    play = world.rollout.play
    world.rollout.play = lambda request, episode: (
        failure() if request.group_id == "g00000002" else play(request, episode)
    )
    await world.run()
    ids = {sample.sample_id[:9] for _, samples in world.learner.steps for sample in samples}
    assert ids == {f"g{index:08d}" for index in (0, 1, 3, 4, 5, 6)}
    assert query(world, "SELECT group_id, attempts FROM groups WHERE state = 'failed'") == [("g00000002", 3)]
    assert world.notes.steps[-1][1]["scheduler/groups_dropped"] == 1


async def test_an_environment_that_always_fails_ends_the_run_with_its_message(world: Any) -> None:
    world.rollout.play = lambda request, episode: failure("ZeroDivisionError: division by zero")
    with pytest.raises(
        RunError, match=r"5 groups in a row failed.*environment_error: ZeroDivisionError: division by zero"
    ):
        await world.run("validation.episodes=0")
    assert world.learner.steps == []
    assert query(world, "SELECT state FROM run") == [("failed",)]
    assert len({request.group_id for request in world.rollout.requests}) < 10, "bounded"


async def test_an_environment_that_always_fails_is_found_by_the_first_validation(world: Any) -> None:
    world.rollout.play = lambda request, episode: failure()
    with pytest.raises(
        RunError, match=r"validation episode val-000000-0-00000. of FrozenLake, seed .*: environment_error"
    ):
        await world.run("validation.episodes=40")
    assert not any(request.group_id[0] == "g" for request in world.rollout.requests)


async def test_a_small_validation_without_a_single_result_ends_the_run(world: Any) -> None:
    world.rollout.play = lambda request, episode: failure("the lake is dry")
    with pytest.raises(RunError, match=r"all 2 validation episodes failed, the last one with .*the lake is dry"):
        await world.run("validation.episodes=2")


async def test_failed_validation_episodes_are_counted_and_lower_no_score(world: Any) -> None:
    world.rollout.play = lambda request, episode: failure() if request.group_id.endswith("-000001") else 1.0
    await world.run("run.max_steps=1")
    for _, _, metrics in world.notes.validations:
        assert (metrics["val/score/mean"], metrics["val/episodes"], metrics["val/failed"]) == (1.0, 2, 3)


async def test_a_lost_server_hands_its_episodes_to_the_others(two_rollouts: Any) -> None:
    world = two_rollouts
    first, second = world.rollouts
    lost = asyncio.Event()

    async def disappear(request: Any) -> None:
        if request.group_id[0] == "g" and request.required_version.step == 1:
            lost.set()
            await asyncio.sleep(60)

    first.before_group = disappear
    task = asyncio.create_task(world.run("validation.episodes=0", "batch.groups_per_step=4"))
    await lost.wait()
    await world.hosts[first].stop()
    summary = await task
    assert summary.totals.samples == 24
    assert query(world, "SELECT DISTINCT reason FROM failures") == [("rollout_lost",)]
    assert any("was lost" in notice for notice in world.notes.notices)
    assert {request.required_version.step for request in second.requests} == {0, 1, 2}


async def test_a_lost_server_that_returns_gets_the_present_version_before_it_plays(two_rollouts: Any) -> None:
    world = two_rollouts
    world.budgets = replace(world.budgets, lost_s=20.0)
    first, second = world.rollouts
    tasks: list[asyncio.Task[None]] = []

    async def restart() -> None:
        await world.hosts[first].stop()
        first.version = weights_pb2.WeightVersion()  # what a restarted process knows
        first.requests.clear()
        await world.hosts[first].start()

    async def die_while_playing(request: Any) -> None:
        if request.required_version.step == 2 and not tasks:
            tasks.append(asyncio.create_task(restart()))
            await asyncio.sleep(60)

    def is_back() -> bool:
        return any("is back" in notice for notice in world.notes.notices)

    async def wait_for_the_first(request: Any) -> None:
        while tasks and not is_back():
            await asyncio.sleep(0.01)

    first.before_group, second.before_group = die_while_playing, wait_for_the_first
    await world.run("validation.episodes=0", "run.max_steps=6", "batch.groups_per_step=4")
    assert is_back()
    assert first.requests and all(request.required_version.step >= 2 for request in first.requests)


async def test_when_no_server_is_left_the_run_ends(world: Any) -> None:
    world.notes.at_step = lambda step: asyncio.create_task(world.hosts[world.rollout].stop()) if step == 0 else None
    with pytest.raises(
        RunError, match=r"all rollout servers were lost for more than 1.5 s \(127.0.0.1:\d+: .*start them"
    ):
        await world.run("validation.episodes=0")


async def test_a_server_without_room_is_asked_again_without_spending_attempts(world: Any) -> None:
    refusals = iter([True] * 5)

    async def full(request: Any) -> None:
        if next(refusals, False):
            raise exhausted(Reason.EPISODES_EXHAUSTED, "full", 0.01)

    world.rollout.before_group = full
    await world.run("validation.episodes=0")
    assert query(world, "SELECT MAX(attempts), COUNT(*) FROM groups") == [(1, 6)]
    assert world.notes.steps[-1][1]["scheduler/requested"] == 12


async def test_more_groups_than_a_server_has_room_for_wait_their_turn(world: Any) -> None:
    world.rollout.capacity = 4

    async def slowly(request: Any) -> None:
        assert world.rollout.in_flight <= 4
        await asyncio.sleep(0.01)

    world.rollout.before_group = slowly
    await world.run("batch.groups_per_step=8")
    assert query(world, "SELECT COUNT(*) FROM failures") == [(0,)]


async def test_a_broken_connection_to_the_learner_repeats_the_step_which_runs_once(world: Any) -> None:
    """I1: the answer was lost after the commit; the repeat gets the stored answer."""
    world.learner.after_train = Once(unavailable(), call=2)
    await world.run()
    assert world.learner.calls == 4 and len(world.learner.steps) == 3
    assert query(world, "SELECT version_before, version_after FROM steps ORDER BY 1") == [(0, 1), (1, 2), (2, 3)]
    assert any("learner" in notice and "was lost" in notice for notice in world.notes.notices)


async def test_a_step_in_progress_is_waited_for(world: Any) -> None:
    busy = RollwireError(grpc.StatusCode.ABORTED, Reason.STEP_IN_PROGRESS, "another step runs")
    world.learner.before_train = Once(busy)
    await world.run("validation.episodes=0")
    assert len(world.learner.steps) == 3


async def test_a_learner_that_was_restarted_ends_the_run(world: Any) -> None:
    def restart() -> None:
        if world.learner.step == 1:
            world.learner.step, world.learner.lineage, world.learner.answers = 0, "fresh", {}

    world.learner.before_train = restart
    with pytest.raises(RunError, match=r"is no longer at version line@1; was it restarted\?"):
        await world.run("validation.episodes=0")


async def test_a_learner_that_stays_away_ends_the_run(world: Any) -> None:
    def stay_away() -> None:
        raise unavailable()

    world.learner.before_train = stay_away
    with pytest.raises(RunError, match=r"learner at .* was lost for more than 1.5 s"):
        await world.run("validation.episodes=0")
    assert query(world, "SELECT state FROM steps") == [("planned",)]


async def test_a_refused_step_ends_the_run(world: Any) -> None:
    world.learner.before_train = Once(invalid_field("samples[0].token_ids", 99, "below the vocabulary"))
    with pytest.raises(RunError, match=r"refused a training step .*samples"):
        await world.run("validation.episodes=0")


async def test_other_weights_than_the_learner_published_are_refused_before_the_first_rollout(world: Any) -> None:
    world.rollout.digest_of = lambda step: b"x" * 32
    with pytest.raises(RunError, match=r"serves line@0 with digest 7878.*but the learner published line@0 with"):
        await world.run()
    assert world.rollout.requests == []


async def test_damaged_weights_are_fetched_again(world: Any) -> None:
    damaged = Once(RollwireError(grpc.StatusCode.DATA_LOSS, Reason.WEIGHTS_CORRUPT, "checksum"), call=2)

    async def update() -> None:
        damaged()

    world.rollout.before_update = update
    await world.run()
    assert world.rollout.updates == [0, 1, 2, 3] and damaged.calls == 5


async def test_weights_of_another_model_end_the_run(world: Any) -> None:
    async def update() -> None:
        raise precondition(Reason.WEIGHTS_MISMATCH, "tensor a has float32[2], the model has float32[3]")

    world.rollout.before_update = update
    with pytest.raises(RunError, match=r"cannot bring line@0 to the rollout server at .*WEIGHTS_MISMATCH: tensor a"):
        await world.run()


async def test_a_coordinator_that_was_replaced_stops(world: Any) -> None:
    """I4."""

    async def fenced(request: Any) -> None:
        raise RollwireError(grpc.StatusCode.ABORTED, Reason.FENCED, "epoch 1 was replaced by epoch 2")

    world.rollout.before_group = fenced
    with pytest.raises(RunError, match=r"refused group .*FENCED: epoch 1 was replaced"):
        await world.run()


async def test_a_trajectory_that_contradicts_itself_ends_the_run(world: Any) -> None:
    world.rollout.play = lambda request, episode: float("nan")
    with pytest.raises(RunError, match=r"broke the contract: .* has the score nan; it must be finite"):
        await world.run()


async def test_a_stream_that_ends_early_loses_the_rest(world: Any) -> None:
    original = type(world.rollout).RunGroup

    async def short(self: Any, request: Any, context: Any) -> Any:
        sent = 0
        async for response in original(self, request, context):
            if request.attempt == 0 and request.group_id == "g00000000" and sent == 1:
                return
            sent += 1
            yield response

    type(world.rollout).RunGroup = short
    try:
        await world.hosts[world.rollout].stop()
        await world.hosts[world.rollout].start()
        await world.run("validation.episodes=0")
    finally:
        type(world.rollout).RunGroup = original
    assert query(world, "SELECT group_id, episode_index, reason FROM failures") == [("g00000000", 1, "rollout_lost")]


async def test_a_server_that_is_not_there_is_named_with_its_address(world: Any) -> None:
    with pytest.raises(RunError) as error:
        await world.run("services.rollout=[127.0.0.1:9]", "timeouts.ready_s=0.3")
    text = str(error.value)
    assert "not ready after timeouts.ready_s=0.3 s: rollout server at 127.0.0.1:9 (" in text
    assert "\n" not in text
    assert world.status.state == coordinator_pb2.RUN_STATE_FAILED


async def test_an_unknown_tag_names_those_on_offer(world: Any) -> None:
    with pytest.raises(RunError, match=r"tag 'Chess'.*it offers FrozenLake, Sokoban"):
        await world.run("environments=[{tag: Chess}]")


@pytest.mark.parametrize("kind", ["environment", "rollout", "learner"])
async def test_a_missing_address_names_the_key(world: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"services.{kind} is empty"):
        await world.run(f"services.{kind}=[]")


async def test_two_learners_are_refused(world: Any) -> None:
    with pytest.raises(ConfigError, match=r"services.learner lists 2 addresses"):
        await world.run("services.learner=[127.0.0.1:1,127.0.0.1:2]")
