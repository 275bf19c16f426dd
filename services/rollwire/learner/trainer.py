"""Everything that touches torch, as one object used from one thread: train, score, publish."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rollwire.learner import checkpoint
from rollwire.learner.batching import Budget, pass_cost_tokens
from rollwire.learner.checkpoint_manifest import Manifest
from rollwire.learner.checkpoint_state import TrainedModel
from rollwire.learner.critic import Critic, load_critic
from rollwire.learner.critic_step import train_critic
from rollwire.learner.device_memory import DeviceMemory, out_of_memory
from rollwire.learner.distributed import InterruptedWorkError, Ranks, on_all_ranks
from rollwire.learner.gradients import Gradients
from rollwire.learner.metrics import finite
from rollwire.learner.model import Policy, load_policy
from rollwire.learner.optimizer import PolicyOptimizer
from rollwire.learner.publish import published
from rollwire.learner.reference import Reference, load_reference
from rollwire.learner.samples import Sample, ScoredSequence
from rollwire.learner.scoring import PerToken, predict, score
from rollwire.learner.step import StepSettings, train_step
from rollwire.rpc.weight_low_rank import LowRank
from rollwire.rpc.weight_publisher import WeightPublisher
from rollwire.serving.accelerator import Accelerator
from rollwire.serving.config.models import RunConfig
from rollwire.serving.config.sections import OptimizerSection
from rollwire.serving.model_tensors import SERVING_TYPES, layouts
from rollwire.v1 import weights_pb2


@dataclass(frozen=True)
class TrainedStep:
    """The result of a training step.

    Attributes:
        manifest: Describes the new weights.
        metrics: Finite values by name.
        duration_s: Wall time of training and publishing.
    """

    manifest: weights_pb2.WeightManifest
    metrics: dict[str, float]
    duration_s: float


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The state that a checkpoint brought back.

    Attributes:
        manifest: Describes the weights.
        calls: State of the training calls, as JSON has it; empty in a new lineage.
    """

    manifest: weights_pb2.WeightManifest
    calls: dict[str, Any]


class Trainer:
    """The policy with its optimizer. Not thread-safe: all methods but `interrupt` run in one thread.

    Every rank has one. Methods marked `on_all_ranks` are called on rank 0 and run on all.

    Attributes:
        policy: The model.
        critic: Predicts returns; None where the configuration needs none.
        reference: Policy that is never trained; None where the configuration needs none.
        ranks: The processes that train together.
        version: The version that the weights are.
        publisher: Holds that version for readers; may be read from any thread.
        changed: True when work has failed after it had changed something that later steps depend on, or when nothing is
            published any more: what there is then is the state of no version.
    """

    def __init__(
        self,
        policy: Policy,
        config: RunConfig,
        *,
        fused: bool,
        critic: Critic | None = None,
        reference: Reference | None = None,
    ) -> None:
        self.policy = policy
        self.critic = critic
        self.reference = reference
        self.ranks = policy.ranks
        self.version = weights_pb2.WeightVersion()
        self.publisher = WeightPublisher()
        self.changed = False
        self._low_rank: dict[str, LowRank] = {}  # adapters as published last
        self._stop = threading.Event()
        self._dtype = SERVING_TYPES[config.model.dtype]
        layouts(policy.model, self._dtype)  # refuses a model that cannot be published
        steps = config.run.max_steps * config.learner.optimizer_steps_per_batch
        frozen = config.learner.critic.warmup_steps * config.learner.optimizer_steps_per_batch
        self._optimizer = _optimizer(policy, config.learner.optimizer, steps - frozen, fused)
        self._critic_optimizer = (
            _optimizer(critic, config.learner.critic.optimizer, steps, fused) if critic is not None else None
        )
        self._models = _trained_models(policy, self._optimizer, critic, self._critic_optimizer)
        # With offloading all of it is in host memory anyway.
        networks: list[Policy | Critic] = [policy] if critic is None else [policy, critic]
        moving = [] if config.learner.cpu_offload else networks
        self._memory = DeviceMemory(
            [network.sharding.outermost(network.model) for network in moving],
            [item.optimizer.adamw for item in self._models if moving],
            policy.device,
            self.ranks,
        )
        self._budget = Budget(
            config.learner.micro_batch_tokens,
            pass_cost_tokens(policy.device.type),
            self._check_stop,
        )

    def interrupt(self) -> None:
        """Makes work in progress end before its next forward pass; may be called from any thread."""
        self._stop.set()

    @on_all_ranks
    def publish(self, version: weights_pb2.WeightVersion) -> weights_pb2.WeightManifest:
        """Names the present weights `version` and copies them, on rank 0; readers get them from now on."""
        if self.ranks.rank == 0:
            tensors = published(self.policy.model, self._dtype, low_rank=self._low_rank)
            manifest = self.publisher.publish(version, tensors, self._low_rank)
        else:
            tensors = published(self.policy.model, self._dtype)
            manifest = weights_pb2.WeightManifest(version=version)
            for _ in tensors:  # this rank's shards go to rank 0
                continue
        self.version = version
        return manifest

    @on_all_ranks
    def train(
        self, samples: Sequence[Sample], settings: StepSettings, version: weights_pb2.WeightVersion
    ) -> TrainedStep:
        """Trains on a batch and publishes the result as `version`.

        Raises:
            InterruptedWorkError: `interrupt` was called.
            RollwireError: RESOURCE_EXHAUSTED / `DEVICE_MEMORY_EXHAUSTED` where the model is whole; else ranks end, as
                after any error.
        """
        started = time.perf_counter()
        optimizers = [item for item in (self._optimizer, self._critic_optimizer) if item is not None]
        attempted_before = [optimizer.attempted for optimizer in optimizers]
        try:
            with self._enough_memory():
                metrics = self._train_models(samples, settings)
            trained = time.perf_counter()
            manifest = self.publish(version)
        except BaseException:
            for optimizer in optimizers:
                optimizer.discard_gradients()
            stepped = attempted_before != [optimizer.attempted for optimizer in optimizers]
            self.changed = stepped or self.publisher.manifest is None
            raise
        ended = time.perf_counter()
        tokens = sum(len(sample.token_ids) for sample in samples)
        metrics |= {
            "time/actor_train/train_step/total": trained - started,
            "time/actor_train/publish/total": ended - trained,
            "actor_train/tokens": float(tokens),
            "actor_train/tokens_per_second": tokens / (trained - started),
        }
        if self.policy.loss_scale.dynamic:
            metrics["actor_train/loss_scale"] = self.policy.loss_scale.value
        return TrainedStep(manifest, finite(metrics), ended - started)

    @on_all_ranks
    def score(self, sequences: Sequence[ScoredSequence], temperature: float) -> list[tuple[PerToken, ...]]:
        """Returns log-probabilities and entropies of each sequence under the present weights, see `scoring.score`."""
        with self._enough_memory():
            return score(self.policy, sequences, temperature, self._budget)

    @on_all_ranks
    def score_reference(self, sequences: Sequence[ScoredSequence], temperature: float) -> list[tuple[PerToken, ...]]:
        """Returns log-probabilities and entropies of each sequence under the reference, which there must be."""
        assert self.reference is not None, "asked for a reference that there is not"
        with self._enough_memory(), self.reference.ready() as policy:
            return score(policy, sequences, temperature, self._budget)

    @on_all_ranks
    def predict(self, sequences: Sequence[ScoredSequence]) -> list[tuple[PerToken, ...]]:
        """Returns the values that the critic, which there must be, predicts for each sequence."""
        assert self.critic is not None, "asked for a critic that there is not"
        with self._enough_memory():
            return predict(self.critic, sequences, self._budget)

    @on_all_ranks
    def save_checkpoint(self, order: checkpoint.SaveOrder) -> Manifest:
        """Writes a checkpoint, see `checkpoint.save`."""
        return checkpoint.save(self.ranks, self._models, self.policy.device, order)

    @on_all_ranks
    def load_checkpoint(self, order: checkpoint.LoadOrder, lineage: str) -> LoadedCheckpoint:
        """Goes back to a checkpoint, see `checkpoint.load`, and publishes its version.

        Args:
            order: What to load.
            lineage: If not empty, the state becomes step 0 of this lineage instead.
        """

        def begin() -> None:
            self.changed = True

        found, calls = checkpoint.load(self.ranks, self._models, self.policy.device, order, begin)
        version = weights_pb2.WeightVersion(lineage=lineage, step=0) if lineage else found.version
        manifest = self.publish(version)
        self.changed = False
        return LoadedCheckpoint(manifest, {} if lineage else calls)

    @on_all_ranks
    def sleep(self) -> int:
        """Moves everything on the devices to host memory; returns the bytes given back, over all ranks."""
        return self._memory.leave()

    @on_all_ranks
    def wake(self) -> None:
        """Moves it back, see `DeviceMemory.come_back`."""
        self._memory.come_back()

    def _train_models(self, samples: Sequence[Sample], settings: StepSettings) -> dict[str, float]:
        """Trains policy and critic, whichever the settings say; returns their metrics."""
        metrics: dict[str, float] = {}
        if not settings.freeze_policy:
            metrics |= train_step(self.policy, self._optimizer, samples, settings, self._budget)
        if settings.train_critic:
            assert self.critic is not None and self._critic_optimizer is not None, "a request for it is refused"
            began = time.perf_counter()
            metrics |= train_critic(self.critic, self._critic_optimizer, samples, settings, self._budget)
            metrics["time/critic/train_step/total"] = time.perf_counter() - began
        return metrics

    @contextmanager
    def _enough_memory(self) -> Iterator[None]:
        """Makes an error of the device's allocator say what to do about it."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            told = out_of_memory(error, self._budget.micro_batch_tokens)
            if not self.ranks.whole:  # it ends them all
                raise torch.OutOfMemoryError(told.message) from error
            raise told from error

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise InterruptedWorkError("the learner is shutting down")


def load_trainer(config: RunConfig, accelerator: Accelerator, ranks: Ranks | None = None) -> Trainer:
    """Loads the models, spreads them over the ranks and prepares their optimizers.

    Raises:
        ServeError: A model cannot be trained or published.
    """
    return Trainer(
        load_policy(config, accelerator, ranks),
        config,
        fused=accelerator.fused_optimizer,
        critic=load_critic(config, accelerator, ranks),
        reference=load_reference(config, accelerator, ranks),
    )


def _optimizer(network: Policy | Critic, settings: OptimizerSection, total_steps: int, fused: bool) -> PolicyOptimizer:
    gradients = Gradients(
        (parameter for parameter in network.model.parameters() if parameter.requires_grad),
        network.ranks,
        network.loss_scale,
        network.sharding.summed,
    )
    return PolicyOptimizer(network.model, settings, total_steps, fused=fused, gradients=gradients)


def _trained_models(
    policy: Policy, optimizer: PolicyOptimizer, critic: Critic | None, critic_optimizer: PolicyOptimizer | None
) -> list[TrainedModel]:
    """Returns the models that training changes."""
    models = [TrainedModel("policy", policy.model, optimizer, policy.loss_scale)]
    if critic is not None and critic_optimizer is not None:
        models.append(TrainedModel("critic", critic.model, critic_optimizer, critic.loss_scale))
    return models
