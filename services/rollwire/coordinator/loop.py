"""The steps of a run: rollout, advantages, training, weights, validation, log. One mechanism for every `max_staleness`.

The axis of all scalars is the number of training steps done before: training step 0 plays with version 0 and stands
at 0, and so does the validation of version 0; the validation after the last step stands at `max_steps`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from rollwire.coordinator.batch import Batch
from rollwire.coordinator.budgets import FailureBudget
from rollwire.coordinator.checkpoints import CheckpointKeeper
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.external import External
from rollwire.coordinator.journaled import JournaledTraining, Position, tokens_of
from rollwire.coordinator.ledger import Ledger
from rollwire.coordinator.logprob_guard import LogprobGuard
from rollwire.coordinator.metrics import (
    Metrics,
    Throughput,
    batch_metrics,
    scheduler_metrics,
    staleness_metrics,
    validation_metrics,
)
from rollwire.coordinator.placement import Placement
from rollwire.coordinator.planner import Planner
from rollwire.coordinator.player import GroupPlayer
from rollwire.coordinator.preparation import BatchPreparer
from rollwire.coordinator.pump import RolloutPump, TakenBatch
from rollwire.coordinator.recorder import Recorder
from rollwire.coordinator.resident import ResidentMemory
from rollwire.coordinator.rollout_pool import RolloutPool
from rollwire.coordinator.status import RunStatus
from rollwire.coordinator.validation import validate
from rollwire.serving.config import RunConfig
from rollwire.serving.config.sections import SamplingSection


@dataclass(frozen=True)
class Parts:
    """What the step loop works with."""

    config: RunConfig
    status: RunStatus
    ledger: Ledger
    recorder: Recorder
    placement: Placement
    planner: Planner
    pool: RolloutPool
    player: GroupPlayer
    external: External
    pump: RolloutPump
    preparer: BatchPreparer
    training: JournaledTraining
    checkpoints: CheckpointKeeper
    guard: LogprobGuard
    budget: FailureBudget
    resident: ResidentMemory


class Stopwatch:
    """Measures phases under names such as `time/step_rollout`."""

    def __init__(self) -> None:
        self.metrics: Metrics = {}
        self._start = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Adds the time since the last lap to a phase."""
        now = time.perf_counter()
        self.metrics[f"time/{name}"] = self.metrics.get(f"time/{name}", 0.0) + now - self._last
        self._last = now

    @property
    def total_s(self) -> float:
        """Time since the start."""
        return time.perf_counter() - self._start


class StepLoop:
    """Drives the steps of one run.

    Args:
        parts: Its parts.
        position: Where it begins; kept up to date.
    """

    def __init__(self, parts: Parts, position: Position) -> None:
        self.totals = position.totals
        self._parts = parts
        self._at = position
        self._throughput = Throughput()

    async def run(self) -> None:
        """Validates, makes every step that is left, validates again. Raises `RunError`."""
        parts, status = self._parts, self._parts.status
        status.begin_phase("pushing weights")
        status.version, status.step = self._at.version, self._at.step
        if parts.placement.colocated:
            await self._save_first_if_due()
        await parts.placement.rollout()
        await parts.pool.push(self._at.version, self._at.digest)
        if not parts.placement.colocated:
            await self._save_first_if_due()
        await self._validate_if_due()
        await parts.external.begin()
        parts.pump.start(self._at.version)
        while self._at.step < parts.config.run.max_steps and status.stop_cause is None:
            await self._step(self._at.step)
            await self._validate_if_due()
        parts.external.end()
        await parts.placement.learner()
        await parts.checkpoints.save(self._at.step, self._at.version)
        if self._at.step < parts.config.run.max_steps:
            return
        assert parts.pump.tally.in_flight == 0, "requested = completed + failed does not hold"
        if parts.config.validation.greedy_at_end and parts.config.validation.episodes > 0:
            greedy = SamplingSection(temperature=0.0)
            await self._play_validation("val_greedy", parts.config.run.max_steps, greedy)

    async def _step(self, step: int) -> None:
        """Makes training step number `step`."""
        parts, watch = self._parts, Stopwatch()
        self._begin_rollout_phase()
        parts.guard.begin(step)
        taken = await parts.pump.next_batch()
        await parts.placement.learner()
        watch.lap("step_rollout")
        parts.status.begin_phase("training")
        batch = await parts.preparer.prepare(taken.groups, parts.guard.comparable(self._at.version), watch.lap)
        gap = await parts.guard.measure(self._at.version, batch)
        metrics = {**gap, **await parts.training.train(self._at, batch)}
        await self._check_gap(step, metrics)
        watch.lap("step_train")
        if parts.placement.colocated:
            await self._save_if_due(metrics, watch)
        parts.status.begin_phase("pushing weights")
        await parts.placement.stage(self._at.version)
        if await parts.placement.rollout() or batch.samples:
            report = await parts.pool.push(self._at.version, self._at.digest)
            metrics["weights/sync_seconds"] = report.seconds
            metrics["weights/sync_bytes"] = float(report.received_bytes)
            metrics["weights/pause_seconds"] = report.pause_s
        watch.lap("step_model_update")
        parts.pump.advance(self._at.version)
        parts.status.step = step + 1
        if not parts.placement.colocated:
            await self._save_if_due(metrics, watch)
        metrics.update(self._describe(step, batch, taken))
        watch.lap("step_compute_data_metrics")
        await parts.recorder.texts(step, batch.consumed)
        watch.lap("step_log")
        seconds = watch.total_s
        metrics["system/tps"] = self._throughput.add(tokens_of(batch.consumed), seconds)
        metrics["time/step_total"] = seconds
        metrics.update(watch.metrics)
        metrics.update(await parts.resident.measure())
        await parts.recorder.scalars(step, metrics)
        parts.status.observer.on_step(step, metrics)

    async def _check_gap(self, step: int, metrics: Metrics) -> None:
        """Ends the run when engine and learner disagree; what was measured is logged before."""
        try:
            self._parts.guard.check(step, metrics)
        except RunError:
            await self._parts.recorder.scalars(step, metrics)
            raise

    def _describe(self, step: int, batch: Batch, taken: TakenBatch) -> Metrics:
        """Returns the metrics of a step's data and scheduling."""
        parts = self._parts
        return {
            **batch_metrics(batch),
            **scheduler_metrics(parts.pump.tally, parts.pump.dropped),
            **staleness_metrics(taken.lags),
            **parts.external.metrics(),
            "scheduler/groups_in_flight": float(parts.pump.in_flight),
            "system/samples": float(self.totals.samples),
            "system/step": float(step),
        }

    async def _save_first_if_due(self) -> None:
        """Saves the checkpoint that a run begins with."""
        if self._parts.checkpoints.due(self._at.step):
            await self._parts.checkpoints.save(self._at.step, self._at.version)

    async def _save_if_due(self, metrics: Metrics, watch: Stopwatch) -> None:
        """Saves a checkpoint, except after the last step: that one follows the loop, however it ends."""
        steps_done, checkpoints = self._at.step, self._parts.checkpoints
        if steps_done == self._parts.config.run.max_steps or not checkpoints.due(steps_done):
            return
        size = await checkpoints.save(steps_done, self._at.version)
        if size is not None:
            metrics["checkpoint/bytes"] = size
        watch.lap("actor_train/do_checkpoint/total")

    async def _validate_if_due(self) -> None:
        """Validates after the first, the last, and every so many steps, unless that was done before."""
        steps_done, settings = self._at.step, self._parts.config.validation
        due = steps_done in (0, self._parts.config.run.max_steps) or (
            settings.every_steps > 0 and steps_done % settings.every_steps == 0
        )
        if due and settings.episodes > 0:
            await self._play_validation("val", steps_done)

    async def _play_validation(self, kind: str, steps_done: int, greedy: SamplingSection | None = None) -> None:
        """Plays the validation set and logs it at the number of steps done, unless that was done before."""
        if any(done[:2] == (steps_done, kind) for done in self.totals.validations):
            return
        parts, watch = self._parts, Stopwatch()
        plans = parts.planner.validation_groups(kind, steps_done, greedy)
        if await parts.placement.rollout():
            await parts.pool.push(self._at.version, self._at.digest)
        parts.status.begin_phase("validating", len(plans))
        result = await validate(kind, steps_done, plans, parts.player, parts.budget, self._at.version)
        await parts.ledger.add_validation(result.records)
        watch.lap("step_val")
        metrics = validation_metrics(result.trajectories, kind)
        metrics[f"{kind}/failed"] = float(result.tally.failed.total())
        if kind == "val":
            metrics.update(watch.metrics)
        await parts.recorder.scalars(steps_done, metrics)
        self.totals.validations.append((steps_done, kind, metrics))
        parts.status.observer.on_validation(steps_done, kind, metrics)

    def _begin_rollout_phase(self) -> None:
        batch = self._parts.config.batch
        self._parts.status.begin_phase("playing", batch.groups_per_step * batch.episodes_per_group)
