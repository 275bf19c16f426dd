"""LearnerService on the wire: a thin shell over training, scoring and export; WeightsService beside it.

All torch work runs in one thread of its own, so that health checks and weight readers are served while a step runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from rollwire.learner.checkpoint_calls import DIRECTORY, CheckpointCalls, remove_leftovers
from rollwire.learner.distributed import connect, rank_failed
from rollwire.learner.export import Exporter
from rollwire.learner.loss_requests import parse_temperature
from rollwire.learner.policy_losses import POLICY_LOSSES
from rollwire.learner.rank_watch import RankFailure, RankWatch
from rollwire.learner.requests import SequenceLimits, parse_sequences
from rollwire.learner.seats import Seat
from rollwire.learner.sleep_calls import SleepCalls
from rollwire.learner.torch_thread import TorchThread
from rollwire.learner.trainer import Trainer, load_trainer
from rollwire.learner.training import Training
from rollwire.rpc.errors import Reason, RollwireError, invalid_field
from rollwire.rpc.ids import is_name, new_id
from rollwire.rpc.limits import INTERNAL_MESSAGE_BYTES
from rollwire.rpc.versions import build_version
from rollwire.serving.accelerator import prepare_for
from rollwire.serving.config.models import RunConfig
from rollwire.serving.config.server_settings import learner_settings
from rollwire.serving.fencing import Fencing
from rollwire.serving.model_files import find_tokenizer, load_tokenizer, tokenizer_hash
from rollwire.serving.model_tensors import SERVING_TYPES
from rollwire.serving.places import require_writable
from rollwire.serving.server import Readiness
from rollwire.serving.weights import WeightsServicer
from rollwire.v1 import learner_pb2, learner_pb2_grpc, weights_pb2

_NO_WEIGHTS_RETRY_S = 1.0


@dataclass(frozen=True)
class _Loaded:
    """What exists once the model is loaded."""

    trainer: Trainer
    training: Training
    exporter: Exporter
    checkpoints: CheckpointCalls
    sleep: SleepCalls
    limits: SequenceLimits
    tokenizer_hash: str


class LearnerServer(learner_pb2_grpc.LearnerServiceServicer):
    """The learner as a `serving.server.Service`.

    Args:
        config: The run.
        seat: This process among the ranks, which is rank 0; by default it is the only one.
        ended_ranks: Returns the ranks whose processes this one started and that have ended.
    """

    full_name = "rollwire.v1.LearnerService"
    message_bytes = INTERNAL_MESSAGE_BYTES

    def __init__(
        self,
        config: RunConfig,
        seat: Seat | None = None,
        ended_ranks: Callable[[], list[RankFailure]] = list,
    ) -> None:
        self._config = config
        self._seat = seat or Seat()
        self._ended_ranks = ended_ranks
        self._watch: RankWatch | None = None
        self._readiness: Readiness | None = None
        self._fencing = Fencing()
        self._torch_thread = TorchThread(self._end)
        self._loaded: _Loaded | None = None
        self._weights = WeightsServicer(lambda: self._ready().trainer.publisher)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicers to the server."""
        learner_pb2_grpc.add_LearnerServiceServicer_to_server(self, server)
        self._weights.register(server)

    async def start(self, readiness: Readiness) -> None:
        """Meets the other ranks, loads the model and publishes version 0 of a new lineage.

        Raises:
            ServeError: `run.output_dir` cannot be written, the model is missing, broken or cannot be trained, or the
                ranks do not come together.
            RollwireError: INTERNAL / `RANK_FAILED`.
        """
        require_writable("run.output_dir", Path(self._config.run.output_dir))
        self._readiness = readiness
        if self._seat.size > 1:
            loop = asyncio.get_running_loop()
            self._watch = RankWatch(
                self._seat,
                lambda failure: loop.call_soon_threadsafe(self._torch_thread.fail, rank_failed(failure)),
                self._ended_ranks,
            )
            self._watch.start()
        self._loaded = await self._torch_thread.run(self._load)
        await readiness.set(True)

    async def close(self) -> None:
        """Abandons a step in progress and frees the torch thread."""
        if self._loaded is not None:
            await self._loaded.training.close()
        if self._watch is not None and not self.rank_failed:
            self._watch.conclude()
        await self._torch_thread.close()

    @property
    def rank_failed(self) -> bool:
        """True once a rank has failed: nothing may wait for the torch thread any more."""
        return self._torch_thread.failed

    async def GetInfo(
        self, request: learner_pb2.LearnerServiceGetInfoRequest, context: grpc.aio.ServicerContext
    ) -> learner_pb2.LearnerServiceGetInfoResponse:
        """Describes the model and the present version."""
        loaded = self._ready()
        policy = loaded.trainer.policy
        present = loaded.training.manifest
        return learner_pb2.LearnerServiceGetInfoResponse(
            build_version=build_version(),
            version=present.version,
            digest=present.digest,
            model_architecture=type(policy.model).__name__,
            parameters=policy.parameters,
            trainable_parameters=policy.trainable_parameters,
            vocabulary_size=loaded.limits.vocabulary_size,
            max_sequence_tokens=loaded.limits.max_tokens,
            device=policy.device.type,
            world_size=self._config.learner.world_size,
            resident_bytes=_resident_bytes(),
            tokenizer_hash=loaded.tokenizer_hash,
            policy_losses=list(POLICY_LOSSES),
            models=_models(loaded.trainer),
            asleep=loaded.sleep.states.asleep,
            settings=learner_settings(self._config),
        )

    async def Train(
        self, request_iterator: AsyncIterator[learner_pb2.TrainRequest], context: grpc.aio.ServicerContext
    ) -> learner_pb2.TrainResponse:
        """Runs one training step."""
        return await self._awake("Train").training.train(request_iterator)

    async def Score(
        self, request_iterator: AsyncIterator[learner_pb2.ScoreRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[learner_pb2.ScoreResponse]:
        """Scores each piece under the weights that are present when its turn comes."""
        async for request in request_iterator:
            loaded = self._awake("Score")
            yield await self._torch_thread.run(self._score, loaded, request)

    async def Export(
        self, request: learner_pb2.ExportRequest, context: grpc.aio.ServicerContext
    ) -> learner_pb2.ExportResponse:
        """Writes the present weights as a Hugging Face directory."""
        loaded = self._ready()
        if not is_name(request.name):
            raise invalid_field("name", request.name, "[a-z0-9][a-z0-9_.-]{0,62} without '..'")
        self._fencing.admit(request.fence)
        return await self._torch_thread.run(loaded.exporter.export, loaded.trainer.publisher, request.name)

    async def SaveCheckpoint(
        self, request: learner_pb2.SaveCheckpointRequest, context: grpc.aio.ServicerContext
    ) -> learner_pb2.SaveCheckpointResponse:
        """Writes everything that the following steps depend on."""
        return await self._awake("SaveCheckpoint").checkpoints.save(request)

    async def LoadCheckpoint(
        self, request: learner_pb2.LoadCheckpointRequest, context: grpc.aio.ServicerContext
    ) -> learner_pb2.LoadCheckpointResponse:
        """Goes back to a checkpoint."""
        return await self._awake("LoadCheckpoint").checkpoints.load(request)

    async def Sleep(
        self, request: learner_pb2.LearnerServiceSleepRequest, context: grpc.aio.ServicerContext
    ) -> learner_pb2.LearnerServiceSleepResponse:
        """Frees the device."""
        return await self._ready().sleep.sleep(request)

    async def Wake(
        self, request: learner_pb2.LearnerServiceWakeRequest, context: grpc.aio.ServicerContext
    ) -> learner_pb2.LearnerServiceWakeResponse:
        """Takes the device again."""
        return await self._ready().sleep.wake(request)

    def _awake(self, wanted: str) -> _Loaded:
        loaded = self._ready()
        loaded.sleep.states.require_awake(wanted)
        return loaded

    def _ready(self) -> _Loaded:
        if self._loaded is None:
            raise RollwireError(
                grpc.StatusCode.UNAVAILABLE,
                Reason.NO_WEIGHTS,
                "the learner is still loading its model; wait until its health service says SERVING",
                retry_after_s=_NO_WEIGHTS_RETRY_S,
            )
        return self._loaded

    def _end(self, error: RollwireError) -> None:
        """Ends all ranks and the server because a rank has failed."""
        if self._watch is not None:
            self._watch.conclude(RankFailure(int(error.metadata["rank"]), error.message))
        if self._readiness is not None:
            self._ending = asyncio.create_task(self._readiness.fail(error.message))

    def _load(self) -> _Loaded:
        config = self._config
        accelerator = prepare_for(config, torch_threads=config.learner.torch_threads)
        ranks = connect(self._seat, config.learner, accelerator.device, self._watch)
        trainer = load_trainer(config, accelerator, ranks)
        tokenizer = load_tokenizer(config.model) if config.model.chat_template else find_tokenizer(config.model)
        first = trainer.publish(weights_pb2.WeightVersion(lineage=new_id("lineage"), step=0))
        longest = min(
            config.rollout.max_episode_tokens, trainer.policy.position_limit or config.rollout.max_episode_tokens
        )
        limits = SequenceLimits(trainer.policy.vocabulary_size, longest)
        training = Training(trainer, first, limits, self._fencing, self._torch_thread)
        output_dir = Path(config.run.output_dir)
        remove_leftovers(output_dir / DIRECTORY)
        return _Loaded(
            trainer=trainer,
            training=training,
            checkpoints=CheckpointCalls(output_dir / DIRECTORY, trainer, training, self._fencing, self._torch_thread),
            sleep=SleepCalls(trainer, training, self._fencing, self._torch_thread),
            exporter=Exporter(
                output_dir / "export",
                trainer.policy.model,
                tokenizer,
                SERVING_TYPES[config.model.dtype],
            ),
            limits=limits,
            tokenizer_hash=tokenizer_hash(tokenizer) if tokenizer is not None else "",
        )

    def _score(self, loaded: _Loaded, request: learner_pb2.ScoreRequest) -> learner_pb2.ScoreResponse:
        trainer, model = loaded.trainer, request.model or learner_pb2.SCORED_MODEL_POLICY
        if trainer.changed:
            raise RollwireError(
                grpc.StatusCode.UNAVAILABLE,
                Reason.NO_WEIGHTS,
                "a training step failed half way, and its weights have no version yet; ask again",
                retry_after_s=_NO_WEIGHTS_RETRY_S,
            )
        if model not in _models(trainer):
            present = ", ".join(learner_pb2.ScoredModel.Name(known) for known in _models(trainer))
            raise invalid_field(
                "model",
                model,
                f"{present}; a reference needs algorithm.kl.coefficient > 0, a critic "
                "algorithm.advantage=gae, when the learner is started",
            )
        sequences = parse_sequences(request.samples, loaded.limits)
        temperature = parse_temperature("temperature", request.temperature)
        response = learner_pb2.ScoreResponse(version=trainer.version)
        if model == learner_pb2.SCORED_MODEL_CRITIC:
            for sequence, (values,) in zip(sequences, trainer.predict(sequences), strict=True):
                response.scores.add(sample_id=sequence.sample_id, values=values.tolist())
            return response
        score = trainer.score if model == learner_pb2.SCORED_MODEL_POLICY else trainer.score_reference
        for sequence, (logprobs, entropies) in zip(sequences, score(sequences, temperature), strict=True):
            response.scores.add(sample_id=sequence.sample_id, logprobs=logprobs.tolist(), entropies=entropies.tolist())
        return response


def _models(trainer: Trainer) -> list[learner_pb2.ScoredModel.ValueType]:
    """Returns the models that can score."""
    present = [learner_pb2.SCORED_MODEL_POLICY]
    if trainer.reference is not None:
        present.append(learner_pb2.SCORED_MODEL_REFERENCE)
    if trainer.critic is not None:
        present.append(learner_pb2.SCORED_MODEL_CRITIC)
    return present


def _resident_bytes() -> int:
    """Returns the resident set size of this process; 0 where the kernel does not show it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
