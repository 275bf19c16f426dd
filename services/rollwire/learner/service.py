"""LearnerService on the wire: a thin shell over training, scoring and export; WeightsService beside it.

All torch work runs in one thread of its own, so that health checks and weight readers are served while a step runs.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import grpc
import grpc.aio

from rollwire.learner.export import Exporter
from rollwire.learner.loss_requests import parse_temperature
from rollwire.learner.policy_losses import POLICY_LOSSES
from rollwire.learner.requests import SequenceLimits, parse_sequences
from rollwire.learner.trainer import Trainer, load_trainer
from rollwire.learner.training import Training
from rollwire.rpc.errors import Reason, RollwireError, invalid_field
from rollwire.rpc.ids import is_name, new_id
from rollwire.rpc.limits import INTERNAL_MESSAGE_BYTES
from rollwire.rpc.versions import build_version
from rollwire.serving.accelerator import prepare
from rollwire.serving.config.models import RunConfig
from rollwire.serving.fencing import Fencing
from rollwire.serving.model_files import find_tokenizer, load_tokenizer, tokenizer_hash
from rollwire.serving.model_tensors import SERVING_TYPES
from rollwire.serving.server import Readiness
from rollwire.serving.weights import WeightsServicer
from rollwire.v1 import learner_pb2, learner_pb2_grpc, weights_pb2

_LOADING_RETRY_S = 1.0
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Loaded:
    """What exists once the model is loaded."""

    trainer: Trainer
    training: Training
    exporter: Exporter
    limits: SequenceLimits
    tokenizer_hash: str


class LearnerServer(learner_pb2_grpc.LearnerServiceServicer):
    """The learner as a `serving.server.Service`."""

    full_name = "rollwire.v1.LearnerService"
    message_bytes = INTERNAL_MESSAGE_BYTES

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._fencing = Fencing()
        self._torch_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")
        self._loaded: _Loaded | None = None
        self._weights = WeightsServicer(lambda: self._ready().trainer.publisher)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicers to the server."""
        learner_pb2_grpc.add_LearnerServiceServicer_to_server(self, server)
        self._weights.register(server)

    async def start(self, readiness: Readiness) -> None:
        """Loads the model and publishes version 0 of a new lineage.

        Raises:
            ServeError: The model is missing, broken or cannot be trained.
        """
        self._loaded = await self._in_torch_thread(self._load)
        await readiness.set(True)

    async def close(self) -> None:
        """Abandons a step in progress and frees the torch thread."""
        if self._loaded is not None:
            await self._loaded.training.close()
        await asyncio.to_thread(self._torch_thread.shutdown, cancel_futures=True)

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
            vocabulary_size=loaded.limits.vocabulary_size,
            max_sequence_tokens=loaded.limits.max_tokens,
            device=policy.device.type,
            world_size=self._config.learner.world_size,
            resident_bytes=_resident_bytes(),
            tokenizer_hash=loaded.tokenizer_hash,
            policy_losses=list(POLICY_LOSSES),
        )

    async def Train(
        self, request_iterator: AsyncIterator[learner_pb2.TrainRequest], context: grpc.aio.ServicerContext
    ) -> learner_pb2.TrainResponse:
        """Runs one training step."""
        return await self._ready().training.train(request_iterator)

    async def Score(
        self, request_iterator: AsyncIterator[learner_pb2.ScoreRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[learner_pb2.ScoreResponse]:
        """Scores each piece under the weights that are present when its turn comes."""
        loaded = self._ready()
        async for request in request_iterator:
            yield await self._in_torch_thread(self._score, loaded, request)

    async def Export(
        self, request: learner_pb2.ExportRequest, context: grpc.aio.ServicerContext
    ) -> learner_pb2.ExportResponse:
        """Writes the present weights as a Hugging Face directory."""
        loaded = self._ready()
        if not is_name(request.name):
            raise invalid_field("name", request.name, "[a-z0-9][a-z0-9_.-]{0,62} without '..'")
        self._fencing.admit(request.fence)
        return await self._in_torch_thread(loaded.exporter.export, loaded.trainer.publisher, request.name)

    def _ready(self) -> _Loaded:
        if self._loaded is None:
            raise RollwireError(
                grpc.StatusCode.UNAVAILABLE,
                Reason.NO_WEIGHTS,
                "the learner is still loading its model; wait until its health service says SERVING",
                retry_after_s=_LOADING_RETRY_S,
            )
        return self._loaded

    async def _in_torch_thread(self, function: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T:
        call = functools.partial(function, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._torch_thread, call)

    def _load(self) -> _Loaded:
        config = self._config
        accelerator = prepare(
            device=config.device,
            attention=config.model.attention,
            torch_threads=config.learner.torch_threads,
            deterministic=config.run.deterministic,
        )
        trainer = load_trainer(config, accelerator)
        tokenizer = load_tokenizer(config.model) if config.model.chat_template else find_tokenizer(config.model)
        first = trainer.publish(weights_pb2.WeightVersion(lineage=new_id("lineage"), step=0))
        longest = min(
            config.rollout.max_episode_tokens, trainer.policy.position_limit or config.rollout.max_episode_tokens
        )
        limits = SequenceLimits(trainer.policy.vocabulary_size, longest)
        return _Loaded(
            trainer=trainer,
            training=Training(trainer, first, limits, self._fencing, self._torch_thread),
            exporter=Exporter(
                Path(config.run.output_dir) / "export",
                trainer.policy.model,
                tokenizer,
                SERVING_TYPES[config.model.dtype],
            ),
            limits=limits,
            tokenizer_hash=tokenizer_hash(tokenizer) if tokenizer is not None else "",
        )

    def _score(self, loaded: _Loaded, request: learner_pb2.ScoreRequest) -> learner_pb2.ScoreResponse:
        sequences = parse_sequences(request.samples, loaded.limits)
        scores = loaded.trainer.score(sequences, parse_temperature("temperature", request.temperature))
        response = learner_pb2.ScoreResponse(version=loaded.trainer.version)
        for sequence, (logprobs, entropies) in zip(sequences, scores, strict=True):
            response.scores.add(sample_id=sequence.sample_id, logprobs=logprobs.tolist(), entropies=entropies.tolist())
        return response


def _resident_bytes() -> int:
    """Returns the resident set size of this process; 0 where the kernel does not show it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
