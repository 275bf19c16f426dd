"""A rollout server as it is served, beside a real environment server and the learner's publisher, all on loopback."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import engine_kit as kit
import grpc.aio
import numpy as np
import torch
from engine_pool import EnginePool

from rollwire.client.rollout import RolloutClient
from rollwire.environment.service import EnvironmentServer
from rollwire.learner.batching import Budget
from rollwire.learner.model import Policy as LearnerPolicy
from rollwire.learner.publish import published
from rollwire.learner.samples import ScoredSequence
from rollwire.learner.scoring import score
from rollwire.rollout.service import RolloutServer
from rollwire.rpc.limits import INTERNAL_MESSAGE_BYTES
from rollwire.rpc.weight_publisher import WeightPublisher
from rollwire.rpc.weight_wire import WEIGHTS_SERVICE
from rollwire.serving.config.models import RunConfig
from rollwire.serving.server import Binding, Readiness, serving
from rollwire.serving.weights import WeightsServicer
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2

FENCE = trajectory_pb2.Fence(run_id="run", epoch=1)


class Publisher:
    """The learner's side: a model that changes, published as the learner publishes it. Keeps every version's model."""

    full_name = WEIGHTS_SERVICE
    message_bytes = INTERNAL_MESSAGE_BYTES

    def __init__(self) -> None:
        self.model = kit.make_model(kit.BUILTIN)
        self.models: dict[int, Any] = {}
        self._publisher = WeightPublisher()

    async def publish(self, scale: float, only: str = "") -> weights_pb2.WeightManifest:
        """Changes the model and publishes it as the next version."""
        kit.perturb(self.model, scale, only)
        step = len(self.models)
        self.models[step] = copy.deepcopy(self.model)
        return await asyncio.to_thread(
            self._publisher.publish, kit.version(step), published(self.models[step], torch.float32)
        )

    def register(self, server: grpc.aio.Server) -> None:
        """See `Service`."""
        WeightsServicer(lambda: self._publisher).register(server)

    async def start(self, readiness: Readiness) -> None:
        """See `Service`."""
        await readiness.set(True)

    async def close(self) -> None:
        """See `Service`."""

    def logprob_gaps(self, sequences: Iterable[trajectory_pb2.TokenSequence], *, shift: int = 0) -> list[float]:
        """Returns how far each drawn token's log-probability is from the learner's under the version of its span.

        Args:
            sequences: Token sequences, drawn at temperature 1, or with LOGPROB_MODE_RAW.
            shift: Added to the step of each version: what if the tokens were another version's?
        """
        wanted: dict[int, list[tuple[ScoredSequence, np.ndarray]]] = {}
        for sequence in sequences:
            covered = np.zeros(len(sequence.token_ids), bool)
            for span in sequence.version_spans:
                mask = np.zeros(len(sequence.token_ids), bool)
                mask[span.range.begin : span.range.end] = True
                assert not (mask & covered).any()
                covered |= mask
                item = ScoredSequence("", np.array(sequence.token_ids, np.int64), mask)
                step = min(max(span.version.step + shift, 0), len(self.models) - 1)
                wanted.setdefault(step, []).append((item, np.array(sequence.logprobs)))
            assert covered.tolist() == list(sequence.loss_mask)
        gaps: list[float] = []
        for step, items in wanted.items():
            learner = LearnerPolicy(self.models[step], torch.device("cpu"), "float32")
            scores = score(learner, [item for item, _ in items], 1.0, Budget(2048, 64))
            for (item, logprobs), (expected, _) in zip(items, scores, strict=True):
                gaps += np.abs(logprobs - expected)[item.loss_mask].tolist()
        return gaps


class Bench:
    """A rollout server, its client, and the servers around it."""

    def __init__(
        self, client: RolloutClient, learner: Publisher, device: str, learner_address: str, environment: str
    ) -> None:
        self.client = client
        self.learner = learner
        self.device = device
        self._learner_address = learner_address
        self._environment = environment
        self._groups = 0

    async def update(
        self, mode: rollout_pb2.PauseMode.ValueType, scale: float = 0.02, only: str = ""
    ) -> tuple[weights_pb2.WeightManifest, rollout_pb2.UpdateWeightsResponse]:
        """Publishes a next version and activates it; returns its manifest and the server's answer."""
        manifest = await self.learner.publish(scale, only)
        request = rollout_pb2.UpdateWeightsRequest(
            fence=FENCE,
            version=manifest.version,
            source=weights_pb2.WeightSource(target=self._learner_address),
            pause_mode=mode,
        )
        return manifest, await self.client.update_weights(request, timeout_s=60)

    async def reset(self) -> None:
        """Activates the weights that the policy ships with, as the next version."""
        self.learner.model = kit.make_model(kit.BUILTIN)
        await self.update(rollout_pb2.PAUSE_MODE_WAIT, 0.0)

    async def generate(self, token_ids: list[int], max_tokens: int, seed: int, **sampling: Any) -> tuple[Any, int]:
        """Generates once; returns the `TokenSequence` and the reason to stop."""
        changed = {"temperature": 1.0, **sampling}
        settings = trajectory_pb2.SamplingSettings(max_tokens=max_tokens, stop_token_ids=[0], **changed)
        request = rollout_pb2.GenerateRequest(token_ids=token_ids, sampling=settings, seed=seed)
        sequence = trajectory_pb2.TokenSequence(
            token_ids=token_ids, loss_mask=[False] * len(token_ids), logprobs=[0.0] * len(token_ids)
        )
        reason = trajectory_pb2.STOP_REASON_UNSPECIFIED
        async for piece in self.client.generate(request, timeout_s=60):
            assert reason == trajectory_pb2.STOP_REASON_UNSPECIFIED
            begin, reason = len(sequence.token_ids), piece.stop_reason
            sequence.token_ids.extend(piece.token_ids)
            sequence.logprobs.extend(piece.logprobs)
            sequence.loss_mask.extend([True] * len(piece.token_ids))
            span = trajectory_pb2.TokenRange(begin=begin, end=len(sequence.token_ids))
            sequence.version_spans.add(range=span, version=piece.version)
        assert reason != trajectory_pb2.STOP_REASON_UNSPECIFIED
        return sequence, reason

    async def drawn(self, tokens: int, unless: Sequence[asyncio.Task[Any]] = ()) -> None:
        """Waits until the engine has drawn so many more tokens, or all of some tasks have ended."""
        before = (await self.client.get_info()).generated_tokens
        while (await self.client.get_info()).generated_tokens < before + tokens:
            if unless and all(task.done() for task in unless):
                return
            await asyncio.sleep(0.005)

    async def play(self, **changes: Any) -> list[rollout_pb2.RunGroupResponse]:
        """Plays a group of FrozenLake episodes; returns the results in the order of the episodes."""
        self._groups += 1
        settings: dict[str, Any] = {
            "fence": FENCE,
            "group_id": f"g{self._groups}",
            "environment_tag": "FrozenLake",
            "environment_targets": [self._environment],
            "environment_seed": 42,
            "episodes": 8,
            "sampling_seed": 5,
            "sampling": trajectory_pb2.SamplingSettings(temperature=1.0, max_tokens=48),
        }
        request = rollout_pb2.RunGroupRequest(**{**settings, **changes})
        results = [result async for result in self.client.run_group(request, timeout_s=100)]
        return sorted(results, key=lambda result: getattr(result, result.WhichOneof("result")).episode_index)


@asynccontextmanager
async def rollout_bench(pool: EnginePool, engine: str) -> AsyncIterator[Bench]:
    """Serves the policy that ships; version 0 is active."""
    base = pool.config(engine, kit.BUILTIN)
    rollout = base.rollout.model_copy(update={"max_episode_tokens": 1024, "max_new_tokens_per_turn": 64})
    config = base.model_copy(update={"rollout": rollout})
    learner = Publisher()
    async with AsyncExitStack() as stack:
        learning = await stack.enter_async_context(serving(learner, Binding(), grace_s=0.2))
        playing = await stack.enter_async_context(serving(EnvironmentServer(RunConfig()), Binding(), grace_s=0.2))
        server = await stack.enter_async_context(serving(RolloutServer(config), Binding(), grace_s=0.5))
        client = await stack.enter_async_context(RolloutClient(server.address))
        bench = Bench(client, learner, pool.device, learning.address, playing.address)
        await bench.update(rollout_pb2.PAUSE_MODE_WAIT, 0.0)
        yield bench
