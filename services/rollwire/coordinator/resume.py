"""Brings a run back to where its journal ends: the learner by a checkpoint, then by training the same batches again.

Every step that was planned is trained with exactly the trajectories of its plan, so that nothing acknowledged is lost
and nothing enters two steps of a lineage. The weights after each such step are compared with those of then. If they are
the same, the lineage goes on. If not, as with kernels whose sums depend on timing, a version would mean two things:
then the learner begins another lineage at the checkpoint, in which the batches are trained once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollwire.coordinator.batch import Batch, select_batch
from rollwire.coordinator.checkpoint_loading import CheckpointLoader
from rollwire.coordinator.errors import ResumeError
from rollwire.coordinator.intake import ProtocolError, oldest_step
from rollwire.coordinator.journal import Journal, JournalStep
from rollwire.coordinator.journaled import DivergedError, Position, Totals
from rollwire.coordinator.ledger_schema import Progress
from rollwire.coordinator.ledger_store import OtherBatchError
from rollwire.coordinator.logged import Logged
from rollwire.coordinator.loop import Parts, Stopwatch
from rollwire.coordinator.metrics import Metrics, batch_metrics, staleness_metrics
from rollwire.coordinator.wording import counted
from rollwire.rpc.versions import version_text
from rollwire.v1 import learner_pb2, trajectory_pb2, weights_pb2


@dataclass(frozen=True)
class _Start:
    """Where the learner is before anything is trained again.

    Attributes:
        step: Training steps done.
        version: Its version.
        digest: Digest of that version.
        exact: True if what follows is compared with what followed then, in the same lineage.
    """

    step: int
    version: weights_pb2.WeightVersion
    digest: bytes
    exact: bool


class Resumption:
    """Resumes one run.

    Args:
        parts: Its parts.
        journal: What the earlier incarnations did.
        logged: What they have logged.
        loader: Has the learner load checkpoints.
        exact: False if the configuration was changed such that results differ by rounding.
    """

    def __init__(
        self, parts: Parts, journal: Journal, logged: Logged, loader: CheckpointLoader, *, exact: bool
    ) -> None:
        self._parts = parts
        self._journal = journal
        self._logged = logged
        self._loader = loader
        self._exact = exact

    async def run(self, learner: learner_pb2.LearnerServiceGetInfoResponse) -> Position:
        """Returns the position that the run goes on from.

        Args:
            learner: What the learner says about itself.

        Raises:
            ResumeError: Neither a checkpoint nor the learner can be gone on from.
        """
        parts, journal = self._parts, self._journal
        parts.status.begin_phase("resuming")
        await parts.recorder.go_on(self._logged)
        start = await self._start(learner)
        try:
            position = await self._train_again(start)
        except (DivergedError, OtherBatchError) as error:
            parts.status.notice(f"{error}; the run goes on in a new lineage of weights")
            position = await self._train_again(await self._begin_lineage())
        await parts.pump.restore(position.step, journal, await parts.ledger.waiting_groups(), position.version)
        position.totals.validations.extend(self._logged.validations)
        again = f", of which {counted(position.step - start.step, 'was', 'were')} trained again"
        parts.status.notice(
            f"resumed after {counted(position.step, 'step')} at {version_text(position.version)}"
            f"{again if position.step > start.step else ''}"
        )
        return position

    async def _start(self, learner: learner_pb2.LearnerServiceGetInfoResponse) -> _Start:
        """Finds the nearest state of the learner: its present one, a checkpoint's, or that of the beginning."""
        journal, loader = self._journal, self._loader
        done = journal.committed
        if self._goes_on(learner.version):
            return _Start(done, self._version_at(done), learner.digest, exact=True)
        for record in reversed(journal.checkpoints):
            later = {step.before.lineage for step in journal.steps[record.step :]}
            # A learner that is further on in this lineage has given its next versions another meaning.
            used = learner.version.lineage == record.version.lineage and learner.version.step > record.version.step
            exact = self._exact and later <= {record.version.lineage} and not used
            loaded = await loader.load(record, new_lineage=not exact)
            if loaded is not None:
                if exact:
                    self._parts.checkpoints.found(record.step)
                return _Start(record.step, loaded.version, loaded.digest, exact)
        return self._beginning(learner)

    async def _begin_lineage(self) -> _Start:
        """Goes back to the newest checkpoint, as the beginning of another lineage."""
        for record in reversed(self._journal.checkpoints):
            loaded = await self._loader.load(record, new_lineage=True)
            if loaded is not None:
                return _Start(record.step, loaded.version, loaded.digest, exact=False)
        raise ResumeError(
            "the run cannot be resumed: it has no checkpoint to begin another lineage from; start a new run"
        )

    def _goes_on(self, version: weights_pb2.WeightVersion) -> bool:
        """Tells whether a learner that was not restarted is where the journal ends."""
        journal = self._journal
        if not self._exact or not journal.steps:
            return False
        done = journal.committed
        present = self._version_at(done)
        planned = journal.steps[done] if done < len(journal.steps) else None
        ahead = planned is not None and planned.before == present and version == planned.after
        return version == present or ahead

    def _version_at(self, steps_done: int) -> weights_pb2.WeightVersion:
        steps = self._journal.steps
        return steps[steps_done - 1].after if steps_done else steps[0].before

    def _beginning(self, learner: learner_pb2.LearnerServiceGetInfoResponse) -> _Start:
        """Begins anew with a learner that is where the run began; all of its batches are trained again."""
        journal = self._journal
        untouched = learner.version.step == 0 and journal.first_digest in (b"", learner.digest)
        if journal.steps and not untouched:
            raise ResumeError(
                "the run cannot be resumed: no checkpoint of it can be loaded, and the learner's weights are not those "
                "that the run began with; start a new run"
            )
        if journal.steps:
            self._parts.status.notice(
                "no checkpoint can be loaded: all steps are trained again from the beginning, in a new lineage"
            )
        return _Start(0, learner.version, learner.digest, exact=False)

    async def _train_again(self, start: _Start) -> Position:
        """Trains every step of the journal from a state on.

        Raises:
            DivergedError: The weights after a step differ from those of then.
            OtherBatchError: Its batch does.
            ResumeError: A step's episodes are gone.
        """
        parts, journal = self._parts, self._journal
        beginning = Progress(kl_coefficient=parts.config.algorithm.kl.coefficient)
        progress = journal.progress(start.step) or beginning
        position = Position(start.step, start.version, start.digest, Totals())
        position.totals.restore(progress)
        parts.preparer.kl_coefficient = progress.kl_coefficient
        for done in journal.steps[self._logged.steps : start.step]:
            await self._log_done(done)
            self._logged.steps = done.step + 1
        for step in journal.steps[start.step :]:
            comparable = start.exact and step.before == position.version
            metrics = await self._train_step(position, step, step.weights_digest if comparable else b"")
            if step.step >= self._logged.steps:
                await parts.recorder.scalars(step.step, metrics)
                parts.status.observer.on_step(step.step, metrics)
                self._logged.steps = step.step + 1
        return position

    async def _train_step(self, position: Position, step: JournalStep, expected: bytes) -> Metrics:
        """Trains a step of the journal; returns what is known of it without playing it. Raises as `_train_again`."""
        parts, watch = self._parts, Stopwatch()
        groups = await parts.ledger.step_groups(step)
        if not groups:
            raise ResumeError(
                f"the run cannot be resumed: the episodes of step {step.step} are no longer in the ledger; start a "
                "new run"
            )
        parts.status.begin_phase(f"training step {step.step + 1} again")
        before = position.version
        batch = await parts.preparer.prepare(groups, parts.guard.comparable(before), watch.lap)
        metrics = dict(await parts.training.train(position, batch, expected))
        watch.lap("step_train")
        metrics |= _describe(step, batch, position.totals.samples)
        metrics |= staleness_metrics(_lags(batch.consumed, before))
        watch.lap("step_compute_data_metrics")
        return metrics | watch.metrics | {"time/step_total": watch.total_s} | await parts.resident.measure()

    async def _log_done(self, step: JournalStep) -> None:
        """Logs a step that was done when the process died, but not logged."""
        groups = await self._parts.ledger.step_groups(step)
        if groups:
            batch = select_batch(groups, self._parts.config.algorithm)
            known = _describe(step, batch, step.progress.samples)
            known |= staleness_metrics(_lags(batch.consumed, step.before))
        else:  # no checkpoint needs its episodes any more
            known = {"system/samples": float(step.progress.samples), "system/step": float(step.step)}
        await self._parts.recorder.scalars(step.step, {**step.metrics, **known})


def _describe(step: JournalStep, batch: Batch, samples: int) -> Metrics:
    return {**batch_metrics(batch), "system/samples": float(samples), "system/step": float(step.step)}


def _lags(consumed: Sequence[trajectory_pb2.Trajectory], version: weights_pb2.WeightVersion) -> list[int]:
    """Returns by how many versions each episode lags; nothing where another lineage of weights has played it."""
    try:
        return [version.step - oldest_step(item, version.lineage, version.step) for item in consumed]
    except ProtocolError:
        return []
