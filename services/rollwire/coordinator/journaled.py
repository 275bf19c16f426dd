"""Training that is journaled: the plan before the learner is asked, the result after it has answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollwire.coordinator.batch import Batch
from rollwire.coordinator.ledger import Ledger
from rollwire.coordinator.ledger_schema import Progress, StepPlan, StepResult
from rollwire.coordinator.metrics import Metrics, count_tokens, finite_metrics
from rollwire.coordinator.preparation import BatchPreparer
from rollwire.coordinator.status import RunStatus
from rollwire.coordinator.training import StepTrainer
from rollwire.rpc.digests import samples_digest
from rollwire.v1 import trajectory_pb2, weights_pb2


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

    def add(self, batch: Batch) -> None:
        """Counts a step's batch."""
        self.samples += len(batch.consumed)
        self.trained += len(batch.trained)
        self.tokens += tokens_of(batch.consumed)

    def restore(self, progress: Progress) -> None:
        """Makes everything but validations what it was at a step."""
        self.samples, self.trained, self.tokens = progress.samples, progress.trained, progress.tokens


@dataclass
class Position:
    """Where a run is.

    Attributes:
        step: Training steps done.
        version: Version that the learner is at.
        digest: Digest of that version.
        totals: What the run has done so far.
    """

    step: int
    version: weights_pb2.WeightVersion
    digest: bytes
    totals: Totals = field(default_factory=Totals)


class DivergedError(Exception):
    """What was trained again is not what was trained then; the text says what differs."""


class JournaledTraining:
    """Trains the steps of a run, one after another.

    Args:
        ledger: The journal.
        trainer: Asks the learner.
        preparer: Knows what the next batch depends on.
        status: Is told the version.
    """

    def __init__(self, ledger: Ledger, trainer: StepTrainer, preparer: BatchPreparer, status: RunStatus) -> None:
        self._ledger = ledger
        self._trainer = trainer
        self._preparer = preparer
        self._status = status

    async def train(self, position: Position, batch: Batch, expected: bytes = b"") -> Metrics:
        """Trains the next step and moves the position; returns what batch and learner report.

        A batch without samples costs no training: the version stays, and the step counts.

        Args:
            position: Where the run is.
            batch: What is trained.
            expected: Digest that the weights must have afterwards; empty for any.

        Raises:
            DivergedError: They have another one; nothing is recorded.
            RunError: The learner or the ledger refuses.
        """
        step, base = position.step, position.version
        await self._ledger.plan_step(_plan(step, base, batch))
        metrics = finite_metrics(batch.metrics)
        if batch.samples:
            response = await self._trainer.train(step, base, batch.samples, batch.kl_coefficient)
            if expected not in (b"", response.digest):
                raise DivergedError(f"training step {step} again gave other weights than the first time")
            metrics |= finite_metrics(response.metrics)
            metrics["time/learner_step"] = response.duration.ToNanoseconds() / 1e9
            position.version, position.digest = response.version, response.digest
        position.totals.add(batch)
        position.step += 1
        totals = position.totals
        await self._ledger.commit_step(
            StepResult(
                step=step,
                lineage=base.lineage,
                version_after=position.version.step,
                weights_digest=position.digest,
                metrics=metrics,
                progress=Progress(totals.samples, totals.trained, totals.tokens, self._preparer.kl_coefficient),
            )
        )
        self._status.version = position.version
        return metrics


def tokens_of(trajectories: Sequence[trajectory_pb2.Trajectory]) -> int:
    """Returns all tokens of some trajectories, prompts included."""
    return sum(count_tokens(trajectory).total for trajectory in trajectories)


def _plan(step: int, base: weights_pb2.WeightVersion, batch: Batch) -> StepPlan:
    return StepPlan(
        step=step,
        base=base,
        digest=samples_digest(batch.samples),
        trained=[trajectory.trajectory_id for trajectory in batch.trained],
        filtered=[trajectory.trajectory_id for trajectory in batch.filtered],
    )
