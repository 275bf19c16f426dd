"""Training calls end to end: upload, claim, computation, publication, answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from rollwire.learner.distributed import InterruptedWorkError, rank_failed
from rollwire.learner.rank_watch import describe
from rollwire.learner.requests import SequenceLimits, needed_fields, parse_header, parse_samples
from rollwire.learner.step import StepSettings
from rollwire.learner.torch_thread import TorchThread
from rollwire.learner.trainer import LoadedCheckpoint, Trainer
from rollwire.learner.training_calls import BatchUpload, Claim, TrainingCalls
from rollwire.rpc.digests import samples_digest
from rollwire.rpc.errors import Reason, RollwireError, invalid_field
from rollwire.rpc.ids import new_id
from rollwire.rpc.versions import version_text
from rollwire.serving.fencing import Fencing
from rollwire.serving.logs import get_logger
from rollwire.v1 import learner_pb2, weights_pb2

_log = get_logger(__name__)


class Training:
    """Runs training steps, one at a time; lives on the event loop and computes in `torch_thread`.

    Attributes:
        calls: Which step may run; knows the present version.
        manifest: Describes the present version.
    """

    def __init__(
        self,
        trainer: Trainer,
        first: weights_pb2.WeightManifest,
        limits: SequenceLimits,
        fencing: Fencing,
        torch_thread: TorchThread,
    ) -> None:
        self.manifest = first
        self.calls = TrainingCalls(first.version)
        self._trainer = trainer
        self._limits = limits
        self._fencing = fencing
        self._torch_thread = torch_thread
        self._running: set[asyncio.Task[learner_pb2.TrainResponse]] = set()

    async def train(self, requests: AsyncIterator[learner_pb2.TrainRequest]) -> learner_pb2.TrainResponse:
        """Answers one call of `LearnerService.Train`.

        The computation goes on when the caller goes away, so that a repeated call finds its answer.

        Raises:
            RollwireError: As the contract says.
        """
        upload = BatchUpload()
        claim: Claim | None = None
        settings: StepSettings | None = None
        try:
            async for request in requests:
                upload.add(request)
                if claim is None:
                    settings = parse_header(upload.header)
                    if settings.train_critic and self._trainer.critic is None:
                        raise invalid_field(
                            "header.train_critic",
                            True,
                            "false: this learner was started without algorithm.advantage=gae",
                        )
                    self._fencing.admit(upload.header.fence)
                    claim = self.calls.open(upload.header)
            digest = await asyncio.to_thread(samples_digest, upload.samples)
            upload.finish(digest)
            assert claim is not None and settings is not None  # `finish` refuses an upload without a header
            self._fencing.admit(upload.header.fence)
            answer = self.calls.begin(claim, digest)
        finally:
            if claim is not None and not claim.computing:
                self.calls.release(claim)
        if answer is not None:
            return answer
        step = asyncio.create_task(self._run(claim, settings, upload, digest))
        self._running.add(step)
        step.add_done_callback(self._ended)
        return await asyncio.shield(step)

    async def close(self) -> None:
        """Abandons a step in progress and waits for its end."""
        self._trainer.interrupt()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _ended(self, step: asyncio.Task[learner_pb2.TrainResponse]) -> None:
        self._running.discard(step)
        if not step.cancelled() and (error := step.exception()) is not None:
            _log.warning("step failed", error=f"{type(error).__name__}: {error}")  # the caller may be gone

    async def _run(
        self, claim: Claim, settings: StepSettings, upload: BatchUpload, digest: bytes
    ) -> learner_pb2.TrainResponse:
        base = self.calls.version
        version = weights_pb2.WeightVersion(lineage=base.lineage, step=base.step + 1)
        try:
            samples = await asyncio.to_thread(parse_samples, upload.samples, self._limits, needed_fields(settings))
            done = await self._torch_thread.run(self._trainer.train, samples, settings, version)
        except InterruptedWorkError as error:
            self.calls.release(claim)
            raise RollwireError(
                grpc.StatusCode.UNAVAILABLE, Reason.DRAINING, f"{error}; the step was abandoned"
            ) from error
        except BaseException:
            try:
                await self.start_lineage_if_changed()
            finally:
                self.calls.release(claim)
            raise
        self.manifest = done.manifest
        answer = learner_pb2.TrainResponse(version=version, metrics=done.metrics, digest=done.manifest.digest)
        answer.duration.FromNanoseconds(int(done.duration_s * 1e9))
        self.calls.commit(claim, digest, answer)
        _log.info(
            "step committed",
            version=version_text(version),
            samples=len(samples),
            duration_s=round(done.duration_s, 3),
            tokens_per_second=round(done.metrics["actor_train/tokens_per_second"]),
        )
        return answer

    def go_on_from(self, loaded: LoadedCheckpoint) -> None:
        """Continues from a checkpoint that the trainer has loaded."""
        self.manifest = loaded.manifest
        self.calls.restore(loaded.manifest.version, loaded.calls)

    async def start_lineage_if_changed(self) -> None:
        """Publishes weights that failed work left between two versions, if it did, as the first of another lineage.

        Raises:
            RollwireError: INTERNAL / `RANK_FAILED`: that failed as well, and the learner ends.
        """
        if not self._trainer.changed or self._torch_thread.failed:
            return
        version = weights_pb2.WeightVersion(lineage=new_id("lineage"), step=0)
        try:
            self.manifest = await self._torch_thread.run(self._trainer.publish, version)
        except Exception as error:
            if not self._torch_thread.failed:  # nobody could tell what a learner without a version trains
                self._torch_thread.fail(rank_failed(describe(0, error)))
            raise
        self._trainer.changed = False
        self.calls.restart(version)
        _log.error("the weights changed half way; the learner began another lineage", version=version_text(version))
