"""The steps of a run: rollout, advantages, training, weights, validation, log. One mechanism for every `max_staleness`.

The axis of all scalars is the number of training steps done before: training step 0 plays with version 0 and stands
at 0, and so does the validation of version 0; the validation after the last step stands at `max_steps`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rollwire.coordinator.batch import Batch
from rollwire.coordinator.budgets import FailureBudget
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.ledger import Ledger
from rollwire.coordinator.ledger_schema import StepPlan
from rollwire.coordinator.logprob_guard import LogprobGuard
from rollwire.coordinator.metrics import (
    Metrics,
    Throughput,
    batch_metrics,
    count_tokens,
    finite_metrics,
    scheduler_metrics,
    staleness_metrics,
    validation_metrics,
)
from rollwire.coordinator.planner import Planner
from rollwire.coordinator.player import GroupPlayer
from rollwire.coordinator.preparation import BatchPreparer
from rollwire.coordinator.pump import RolloutPump, TakenBatch
from rollwire.coordinator.recorder import Recorder
from rollwire.coordinator.resident import ResidentMemory
from rollwire.coordinator.rollout_pool import RolloutPool
from rollwire.coordinator.status import RunStatus
from rollwire.coordinator.training import StepTrainer
from rollwire.coordinator.validation import validate
from rollwire.rpc.digests import samples_digest
from rollwire.serving.config import RunConfig
from rollwire.serving.config.sections import SamplingSection
from rollwire.v1 import weights_pb2


@dataclass(frozen=True)
class Parts:
    """What the step loop works with."""

    config: RunConfig
    status: RunStatus
    ledger: Ledger
    recorder: Recorder
    planner: Planner
    pool: RolloutPool
    player: GroupPlayer
    pump: RolloutPump
    preparer: BatchPreparer
    trainer: StepTrainer
    guard: LogprobGuard
    budget: FailureBudget
    resident: ResidentMemory


@dataclass
class Totals:
    """What a run has done so far.

    Attributes:
        samples: Trajectories consumed.
        trained: Those of them that entered an optimizer step.
        tokens: Tokens of those trajectories.
        validations: Steps done and metrics of each validation, in order.
    """

    samples: int = 0
    trained: int = 0
    tokens: int = 0
    validations: list[tuple[int, str, Metrics]] = field(default_factory=list)


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
        version: Version that the learner is at.
        digest: Digest of that version.
    """

    def __init__(self, parts: Parts, version: weights_pb2.WeightVersion, digest: bytes) -> None:
        self.totals = Totals()
        self._parts = parts
        self._version = version
        self._digest = digest
        self._throughput = Throughput()

    async def run(self) -> None:
        """Validates, makes every step, validates again. Raises `RunError`."""
        parts, status = self._parts, self._parts.status
        status.begin_phase("pushing weights")
        status.version = self._version
        await parts.pool.push(self._version, self._digest)
        await self._validate(0)
        parts.pump.start(self._version)
        for step in range(parts.config.run.max_steps):
            if status.stop_cause is not None:
                return
            await self._step(step)
            if self._validation_due(step + 1):
                await self._validate(step + 1)
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
        watch.lap("step_rollout")
        parts.status.begin_phase("training")
        batch = await parts.preparer.prepare(taken.groups, parts.guard.comparable(self._version), watch.lap)
        gap = await parts.guard.measure(self._version, batch)
        metrics = {**gap, **await self._train(step, batch)}
        await self._check_gap(step, metrics)
        watch.lap("step_train")
        parts.status.begin_phase("pushing weights")
        if batch.samples:
            report = await parts.pool.push(self._version, self._digest)
            metrics["weights/sync_seconds"] = report.seconds
            metrics["weights/sync_bytes"] = float(report.received_bytes)
            metrics["weights/pause_seconds"] = report.pause_s
        watch.lap("step_model_update")
        parts.pump.advance(self._version)
        parts.status.step = step + 1
        metrics.update(self._describe(step, batch, taken))
        watch.lap("step_compute_data_metrics")
        await parts.recorder.texts(step, batch.consumed)
        watch.lap("step_log")
        seconds = watch.total_s
        tokens = sum(count_tokens(trajectory).total for trajectory in batch.consumed)
        self.totals.tokens += tokens
        metrics["system/tps"] = self._throughput.add(tokens, seconds)
        metrics["time/step_total"] = seconds
        metrics.update(watch.metrics)
        metrics.update(await parts.resident.measure())
        await parts.recorder.scalars(step, metrics)
        parts.status.observer.on_step(step, metrics)

    async def _train(self, step: int, batch: Batch) -> Metrics:
        """Journals the plan, trains, journals the result; returns the metrics, nothing if no sample was left.

        A batch without samples costs no training: the version stays, and the step counts.
        """
        parts, base = self._parts, self._version
        plan = StepPlan(
            step=step,
            base=base,
            digest=samples_digest(batch.samples),
            trained=[trajectory.trajectory_id for trajectory in batch.trained],
            filtered=[trajectory.trajectory_id for trajectory in batch.filtered],
        )
        await parts.ledger.plan_step(plan)
        metrics = finite_metrics(batch.metrics)
        if batch.samples:
            response = await parts.trainer.train(step, base, batch.samples, batch.kl_coefficient)
            metrics |= finite_metrics(response.metrics)
            metrics["time/learner_step"] = response.duration.ToNanoseconds() / 1e9
            self._version, self._digest = response.version, response.digest
        await parts.ledger.commit_step(step, base.lineage, self._version.step, metrics)
        parts.status.version = self._version
        return metrics

    async def _check_gap(self, step: int, metrics: Metrics) -> None:
        """Ends the run when engine and learner disagree; what was measured is logged before."""
        try:
            self._parts.guard.check(step, metrics)
        except RunError:
            await self._parts.recorder.scalars(step, metrics)
            raise

    def _describe(self, step: int, batch: Batch, taken: TakenBatch) -> Metrics:
        """Returns the metrics of a step's data and scheduling, and adds the step to the totals."""
        parts = self._parts
        self.totals.samples += len(batch.consumed)
        self.totals.trained += len(batch.trained)
        return {
            **batch_metrics(batch),
            **scheduler_metrics(parts.pump.tally, parts.pump.dropped),
            **staleness_metrics(taken.lags),
            "scheduler/groups_in_flight": float(parts.pump.in_flight),
            "system/samples": float(self.totals.samples),
            "system/step": float(step),
        }

    def _validation_due(self, steps_done: int) -> bool:
        every = self._parts.config.validation.every_steps
        return steps_done == self._parts.config.run.max_steps or (every > 0 and steps_done % every == 0)

    async def _validate(self, steps_done: int) -> None:
        if self._parts.config.validation.episodes > 0:
            await self._play_validation("val", steps_done, self._parts.config.validation.sampling)

    async def _play_validation(self, kind: str, steps_done: int, sampling: SamplingSection) -> None:
        """Plays the validation set and logs it at the number of steps done."""
        parts, watch = self._parts, Stopwatch()
        plans = parts.planner.validation_groups(kind, steps_done, sampling)
        parts.status.begin_phase("validating", len(plans))
        result = await validate(kind, steps_done, plans, parts.player, parts.budget, self._version)
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
