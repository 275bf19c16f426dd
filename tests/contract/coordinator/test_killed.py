"""A coordinator that ends at any write of its ledger, its event file or its metrics goes on as if nothing had been."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollwire.coordinator.errors import RunError
from rollwire.coordinator.ledger import Ledger
from rollwire.coordinator.tracking import Tracker

STEPS = 4
SETTINGS = (f"run.max_steps={STEPS}", "run.checkpoint_every_steps=2", "validation.every_steps=1")
STRIDE = 5
"""Every fifth point, others for each way to die."""


class Death:
    """Lets one write through, or not, and nothing after it."""

    def __init__(self, point: int, *, written: bool) -> None:
        self.happened = False
        self._point = point
        self._written = written
        self._writes = 0

    def before(self) -> int:
        self._writes += 1
        if self._writes == self._point and not self._written:
            self.happened = True
        if self.happened:
            raise RunError("the test ends the run here")
        return self._writes

    def after(self, number: int) -> None:
        if number == self._point:
            self.happened = True
            raise RunError("the test ends the run here")


async def run_to_its_death(world: Any, monkeypatch: pytest.MonkeyPatch, death: Death) -> None:
    ledger_write, tracker_write = Ledger._write, Tracker._write

    async def to_ledger(ledger: Any, method: Any, *arguments: Any) -> Any:
        if method.__name__ == "close":
            return await ledger_write(ledger, method, *arguments)
        number = death.before()
        result = await ledger_write(ledger, method, *arguments)
        death.after(number)
        return result

    def to_tracker(tracker: Any, event: Any, line: Any) -> None:
        number = death.before()
        tracker_write(tracker, event, line)
        death.after(number)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_write", to_ledger)
        patch.setattr(Tracker, "_write", to_tracker)
        try:
            await world.run(*SETTINGS)
        except RunError as error:
            assert death.happened, error


def assert_nothing_lost_or_twice(world: Any) -> None:
    """I1, I2: steps, trajectories, curves."""
    with sqlite3.connect(world.run_dir.path / "run.db") as connection:
        states = connection.execute(
            "SELECT step, state FROM steps WHERE rowid IN (SELECT MAX(rowid) FROM steps GROUP BY step) ORDER BY step"
        ).fetchall()
        assert states == [(step, "committed") for step in range(STEPS)]
        assert connection.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall() == [
            ("consumed", 2 * STEPS)
        ]
        entered = connection.execute("SELECT lineage, trajectory_id FROM step_trajectories").fetchall()
        assert len(entered) == len(set(entered)) and len({item for _, item in entered}) == 4 * STEPS
    events = EventAccumulator(str(world.run_dir.event_dir), size_guidance={"scalars": 0})
    events.Reload()
    assert [point.step for point in events.Scalars("time/learner_step")] == list(range(STEPS))
    assert [point.step for point in events.Scalars("val/score/mean")] == list(range(STEPS + 1))
    lines = [json.loads(line) for line in (world.run_dir.path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "system/samples" in line]
    assert [line["step"] for line in steps] == list(range(STEPS))
    assert [line["system/samples"] for line in steps] == [4.0 * (step + 1) for step in range(STEPS)]
    for line in steps:
        if "scheduler/requested" in line:  # a step that is trained again is not played again
            parts = ("completed", "failed", "in_flight")
            assert line["scheduler/requested"] == sum(line[f"scheduler/{part}"] for part in parts)


@pytest.mark.parametrize("restarted", [True, False], ids=["learner-restarted", "learner-alive"])
@pytest.mark.parametrize("written", [True, False], ids=["after-the-write", "before-the-write"])
async def test_a_run_may_die_at_any_write(
    world: Any, monkeypatch: pytest.MonkeyPatch, written: bool, restarted: bool
) -> None:
    """I1, I2, I7."""
    first = 1 + (2 * written + restarted) % STRIDE
    for point in range(first, 1000, STRIDE):
        world.learner.__init__()
        world.rollout.__init__()
        death = Death(point, written=written)
        await run_to_its_death(world, monkeypatch, death)
        if not death.happened:
            break
        if restarted:
            world.learner.restart()
        await world.resume(*SETTINGS)
        assert_nothing_lost_or_twice(world)
    assert point > 30, "the run has fewer writes than it must have"
