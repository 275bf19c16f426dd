"""A run that ended somewhere goes on: nothing acknowledged is lost, nothing is trained or logged twice."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections import Counter
from typing import Any

import grpc
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollwire.coordinator.errors import ResumeError, RunError
from rollwire.rpc.digests import samples_digest
from rollwire.rpc.errors import Reason, RollwireError, invalid_field
from rollwire.rpc.ids import is_name

SETTINGS = ("run.max_steps=5", "run.checkpoint_every_steps=2", "validation.every_steps=1", "validation.episodes=2")

NOT_PLAYED = (
    *(f"scheduler/{name}" for name in ("requested", "completed", "failed", "in_flight")),
    "scheduler/groups_dropped",
    "scheduler/groups_in_flight",
    "system/tps",
    "time/step_rollout",
    "time/step_model_update",
    "time/step_log",
    *(f"weights/{name}" for name in ("sync_seconds", "sync_bytes", "pause_seconds")),
)
"""Scalars that a step does not have whose episodes an earlier incarnation has played."""


def query(world: Any, text: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(world.run_dir.path / "run.db") as connection:
        return connection.execute(text).fetchall()


def at_call(number: int) -> Any:
    """Raises once, at the n-th call, what ends a run."""
    calls = iter(range(1, 1000))

    def check() -> None:
        if next(calls) == number:
            raise invalid_field("test", "now", "nothing: the test ends the run here")

    return check


async def ended_early(world: Any, *settings: str) -> None:
    with pytest.raises(RunError, match="the test ends the run here"):
        await world.run(*SETTINGS, *settings)


def batches(world: Any) -> dict[str, list[tuple[int, bytes]]]:
    """Step and digest of every batch that the learner has trained, by lineage."""
    found: dict[str, list[tuple[int, bytes]]] = {}
    for header, samples in world.learner.steps:
        base = header.base_version
        found.setdefault(base.lineage, []).append((base.step, samples_digest(samples)))
    return found


def scalars(world: Any, name: str) -> list[int]:
    """Steps at which TensorBoard shows a scalar."""
    events = EventAccumulator(str(world.run_dir.event_dir), size_guidance={"scalars": 0})
    events.Reload()
    return [point.step for point in events.Scalars(name)]


def assert_whole(world: Any, steps: int = 5) -> None:
    """Every step is committed and logged once, and each trajectory entered one step of each lineage (I1, I2)."""
    assert query(world, "SELECT DISTINCT step FROM steps WHERE state = 'committed' ORDER BY 1") == [
        (step,) for step in range(steps)
    ]
    newest = "SELECT DISTINCT state FROM steps WHERE rowid IN (SELECT MAX(rowid) FROM steps GROUP BY step)"
    assert query(world, newest) == [("committed",)]
    assert query(world, "SELECT COUNT(*) FROM groups WHERE state = 'accepted'") == [(0,)]
    assert scalars(world, "time/learner_step") == list(range(steps))
    assert scalars(world, "val/score/mean") == list(range(steps + 1))
    lines = [json.loads(line) for line in (world.run_dir.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "system/samples" in line] == list(range(steps))
    assert [line["system/samples"] for line in lines if "system/samples" in line] == [
        4.0 * (step + 1) for step in range(steps)
    ]


async def uninterrupted(world: Any) -> list[tuple[int, bytes]]:
    """What the same run trains when nothing happens, from the servers' point of view."""
    await world.run(*SETTINGS)
    trained = batches(world)["line"]
    world.learner.steps.clear()
    world.learner.lineage, world.learner.step, world.learner.answers = "line", 0, {}
    world.learner.checkpoints.clear()
    world.rollout.requests.clear()
    return trained


async def test_a_restarted_learner_goes_on_from_the_newest_checkpoint(world: Any) -> None:
    """I7."""
    expected = await uninterrupted(world)
    world.learner.before_train = at_call(4)
    await ended_early(world)
    assert query(world, "SELECT state FROM run") == [("failed",)]
    world.learner.restart()
    played = len(world.rollout.requests)
    summary = await world.resume(*SETTINGS)
    assert (summary.steps, summary.totals.samples) == (5, 20)
    (name, new_lineage), *others = world.learner.loads
    assert name.endswith("-000002") and not new_lineage and not others
    # Steps 0 to 2 were trained before, 2 is trained again from the checkpoint, 3 was planned with what was there.
    assert batches(world)["line"] == [*expected[:3], *expected[2:]]
    again = [request.group_id for request in world.rollout.requests[played:] if request.group_id.startswith("g")]
    assert sorted(again) == ["g00000008", "g00000009"], "nothing that was accepted is played again"
    assert query(world, "SELECT epoch, state FROM run") == [(2, "finished")]
    assert {request.fence.epoch for request in world.rollout.requests[played:]} == {2}
    (again_at, trained_again), (at, played) = world.notes.steps
    assert (again_at, at) == (3, 4)
    assert played.keys() - trained_again.keys() == set(NOT_PLAYED) and trained_again.keys() <= played.keys()
    assert len(summary.totals.validations) == 6
    assert_whole(world)


async def test_a_learner_that_ran_on_is_asked_for_the_planned_step_again(world: Any) -> None:
    """I1: the step was executed, its answer was lost, and nothing is loaded."""
    world.learner.after_train = at_call(3)
    await ended_early(world)
    assert world.learner.step == 3 and query(world, "SELECT COUNT(*) FROM steps WHERE state = 'planned'") == [(1,)]
    await world.resume(*SETTINGS)
    assert world.learner.loads == []
    assert [step for step, _ in batches(world)["line"]] == [0, 1, 2, 3, 4], "no step is executed twice"
    assert_whole(world)


async def test_groups_that_wait_are_used_and_lost_ones_are_played_under_their_index(world: Any) -> None:
    """I2: group 5 was complete when the run ended, group 4 was not."""
    expected = await uninterrupted(world)
    stop = at_call(1)

    async def end_at_the_fourth(request: Any) -> None:
        while not query(world, "SELECT 1 FROM groups WHERE group_id = 'g00000005'") and request.group_id == "g00000004":
            await asyncio.sleep(0.01)
        if request.group_id == "g00000004":
            stop()

    world.rollout.before_group = end_at_the_fourth
    await ended_early(world)
    assert query(world, "SELECT group_id FROM groups WHERE state = 'accepted'") == [("g00000005",)]
    world.learner.restart()
    played = len(world.rollout.requests)
    await world.resume(*SETTINGS)
    again = [request.group_id for request in world.rollout.requests[played:] if request.group_id.startswith("g")]
    assert sorted(again) == ["g00000004", *(f"g{index:08d}" for index in range(6, 10))]
    assert batches(world)["line"] == expected
    assert_whole(world)


def rounded_after_two(step: int) -> bytes:
    return hashlib.sha256(f"weights {step}{' rounded' if step > 2 else ''}".encode()).digest()


async def test_other_weights_after_a_replay_begin_a_lineage(world: Any) -> None:
    world.learner.before_train = at_call(4)
    await ended_early(world)
    world.learner.restart()
    # The checkpoint gives back the weights of step 2; what is trained from there has other rounding.
    world.learner.digest_of = world.rollout.digest_of = rounded_after_two
    await world.resume(*SETTINGS)
    assert [new_lineage for _, new_lineage in world.learner.loads] == [False, True]
    assert any(
        "training step 2 again gave other weights than the first time; the run goes on in a new lineage" in text
        for text in world.notes.notices
    )
    found = batches(world)
    assert [step for step, _ in found["line-new"]] == [0, 1, 2]
    assert found["line-new"][0][1] == found["line"][2][1], "the same batch as then"
    assert query(world, "SELECT step FROM steps WHERE lineage = 'line-new' ORDER BY 1") == [(2,), (3,), (4,)]
    assert_whole(world)


async def test_a_damaged_checkpoint_is_told_about_and_an_earlier_one_taken(world: Any) -> None:
    world.learner.before_train = at_call(4)
    await ended_early(world)
    world.learner.restart()
    newest = list(world.learner.checkpoints)[-1]
    world.learner.damaged.add(newest)
    await world.resume(*SETTINGS)
    assert any(
        "the checkpoint after 2 steps cannot be used, the one before is tried: a shard was changed" in text
        for text in world.notes.notices
    )
    assert [name[-7:] for name, _ in world.learner.loads] == ["-000000"]
    assert [step for step, _ in batches(world)["line"]] == [0, 1, 2, 0, 1, 2, 3, 4]
    assert_whole(world)


async def test_without_a_checkpoint_everything_is_trained_again_from_the_beginning(world: Any) -> None:
    world.learner.before_train = at_call(3)
    await ended_early(world, "run.checkpoint_every_steps=0")
    world.learner.restart()
    await world.resume(*SETTINGS, "run.checkpoint_every_steps=0")
    assert world.learner.loads == []
    found = batches(world)
    assert found["line-restarted"][:2] == found["line"][:2]
    assert any(
        "all steps are trained again from the beginning, in a new lineage" in text for text in world.notes.notices
    )
    assert_whole(world)


async def test_a_learner_with_other_weights_and_no_checkpoint_is_refused(world: Any) -> None:
    world.learner.before_train = at_call(3)
    await ended_early(world, "run.checkpoint_every_steps=0")
    world.learner.restart()
    world.learner.digest_of = lambda step: b"x" * 32
    with pytest.raises(ResumeError, match="the learner's weights are not those that the run began with"):
        await world.resume(*SETTINGS, "run.checkpoint_every_steps=0")


async def test_changed_rounding_begins_a_lineage_at_once(world: Any) -> None:
    world.learner.before_train = at_call(4)
    await ended_early(world)
    world.learner.restart()
    await world.resume(*SETTINGS, exact=False)
    assert [new_lineage for _, new_lineage in world.learner.loads] == [True]
    assert_whole(world)


@pytest.mark.parametrize("max_staleness", [1, 2])
async def test_a_run_with_staleness_goes_on_within_its_bound(world: Any, max_staleness: int) -> None:
    """I5, I6."""
    world.learner.before_train = at_call(4)
    await ended_early(world, f"max_staleness={max_staleness}")
    world.learner.restart()
    await world.resume(*SETTINGS, f"max_staleness={max_staleness}")
    ids = Counter(sample.sample_id for header, samples in world.learner.steps for sample in samples)
    assert len(ids) == 20
    for line in (world.run_dir.path / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line).get("staleness/max", 0) <= max_staleness
    assert query(world, "SELECT COUNT(*) FROM groups WHERE state = 'consumed'") == [(10,)]
    assert scalars(world, "time/learner_step") == list(range(5))


async def test_a_longer_run_goes_on_where_it_was_finished(world: Any) -> None:
    await world.run(*SETTINGS)
    world.learner.restart()
    summary = await world.resume(*SETTINGS, "run.max_steps=7")
    assert (summary.steps, summary.totals.samples) == (7, 28)
    assert_whole(world, 7)
    with pytest.raises(ResumeError, match=r"run\.max_steps is 2, but the run has begun 7 steps"):
        await world.resume(*SETTINGS, "run.max_steps=2")


async def test_a_run_is_made_longer_more_than_once_and_every_export_has_a_name_of_its_own(world: Any) -> None:
    await world.run("run.max_steps=1", f"run.name={'n' * 40}")
    run_id = world.status.run_id
    paths = [
        (await world.resume(f"run.max_steps={steps}", f"run.name={'n' * 40}")).export_path.rpartition("/")[2]
        for steps in (2, 3, 4)
    ]
    assert paths == [f"final-{run_id}-e{epoch}" for epoch in (2, 3, 4)]
    assert all(is_name(path) for path in paths)


async def test_a_disk_that_refuses_checkpoints_does_not_end_the_run(world: Any) -> None:
    def refuse() -> None:
        raise RollwireError(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.STORAGE_FAILED, "No space left on device")

    world.learner.before_save = refuse
    summary = await world.run(*SETTINGS)
    assert summary.steps == 5
    problem = "there is no checkpoint after {} steps: No space left on device".format
    then = ". The run goes on; the next one is tried "
    assert [text for text in world.notes.notices if "no checkpoint after" in text] == [
        f"{problem(0)}{then}after 2 steps",
        f"{problem(2)}{then}after 4 steps",
        f"{problem(4)}{then}at the end of the run",
        problem(5),
    ]
    assert summary.unsaved == problem(5)


async def test_checkpoints_are_remembered_and_old_ones_forgotten(world: Any) -> None:
    await world.run(*SETTINGS, "run.keep_checkpoints=2")
    assert query(world, "SELECT step, lineage, version FROM checkpoints ORDER BY step") == [
        (4, "line", 4),
        (5, "line", 5),
    ]
    assert [name[-7:] for name in world.learner.checkpoints] == ["-000004", "-000005"]
