"""Everything that touches torch, as one object used from one thread: train, score, publish."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rollwire.learner.batching import Budget
from rollwire.learner.distributed import InterruptedWorkError, Ranks, on_all_ranks
from rollwire.learner.gradients import Gradients
from rollwire.learner.metrics import finite
from rollwire.learner.model import Policy, load_policy
from rollwire.learner.optimizer import PolicyOptimizer
from rollwire.learner.publish import published
from rollwire.learner.samples import Sample, ScoredSequence
from rollwire.learner.scoring import PerToken, score
from rollwire.learner.step import StepSettings, train_step
from rollwire.rpc.weight_publisher import WeightPublisher
from rollwire.serving.accelerator import Accelerator
from rollwire.serving.config.models import RunConfig
from rollwire.serving.model_tensors import SERVING_TYPES, layouts
from rollwire.v1 import weights_pb2

# What a forward and backward pass costs beside its tokens: Python on a CPU, kernel launches on an accelerator.
_PASS_COST_TOKENS_CPU: Final = 128
_PASS_COST_TOKENS_ACCELERATOR: Final = 2048


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


class Trainer:
    """The policy with its optimizer. Not thread-safe: all methods but `interrupt` run in one thread.

    Every rank has one. Methods marked `on_all_ranks` are called on rank 0 and run on all.

    Attributes:
        policy: The model.
        ranks: The processes that train together.
        version: The version that the weights are.
        publisher: Holds that version for readers; may be read from any thread.
        changed: True from the first applied optimizer step of a training step until that step has completed, and when
            nothing is published any more: after an error in between the weights are those of no version.
    """

    def __init__(self, policy: Policy, config: RunConfig, *, fused: bool) -> None:
        self.policy = policy
        self.ranks = policy.ranks
        self.version = weights_pb2.WeightVersion()
        self.publisher = WeightPublisher()
        self.changed = False
        self._stop = threading.Event()
        self._dtype = SERVING_TYPES[config.model.dtype]
        layouts(policy.model, self._dtype)  # refuses a model that cannot be published
        self._optimizer = PolicyOptimizer(
            policy.model,
            config.learner.optimizer,
            config.run.max_steps * config.learner.optimizer_steps_per_batch,
            fused=fused,
            gradients=Gradients(
                (parameter for parameter in policy.model.parameters() if parameter.requires_grad),
                self.ranks,
                policy.loss_scale,
                policy.sharding.summed,
            ),
        )
        on_cpu = policy.device.type == "cpu"
        self._budget = Budget(
            config.learner.micro_batch_tokens,
            _PASS_COST_TOKENS_CPU if on_cpu else _PASS_COST_TOKENS_ACCELERATOR,
            self._check_stop,
        )

    def interrupt(self) -> None:
        """Makes work in progress end before its next forward pass; may be called from any thread."""
        self._stop.set()

    @on_all_ranks
    def publish(self, version: weights_pb2.WeightVersion) -> weights_pb2.WeightManifest:
        """Names the present weights `version` and copies them, on rank 0; readers get them from now on."""
        tensors = published(self.policy.model, self._dtype)
        if self.ranks.rank == 0:
            manifest = self.publisher.publish(version, tensors)
        else:
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
        """
        started = time.perf_counter()
        applied_before = self._optimizer.applied
        try:
            metrics = train_step(self.policy, self._optimizer, samples, settings, self._budget)
            trained = time.perf_counter()
            manifest = self.publish(version)
        except BaseException:
            self._optimizer.discard_gradients()
            self.changed = self._optimizer.applied > applied_before or self.publisher.manifest is None
            raise
        ended = time.perf_counter()
        tokens = sum(len(sample.token_ids) for sample in samples)
        metrics |= {
            "time/actor_train/train_step/total": trained - started,
            "time/actor_train/publish/total": ended - trained,
            "actor_train/tokens": float(tokens),
            "actor_train/tokens_per_second": tokens / (trained - started),
        }
        return TrainedStep(manifest, finite(metrics), ended - started)

    @on_all_ranks
    def score(self, sequences: Sequence[ScoredSequence], temperature: float) -> list[tuple[PerToken, PerToken]]:
        """Returns log-probabilities and entropies of each sequence under the present weights, see `scoring.score`."""
        return score(self.policy, sequences, temperature, self._budget)

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise InterruptedWorkError("the learner is shutting down")


def load_trainer(config: RunConfig, accelerator: Accelerator, ranks: Ranks | None = None) -> Trainer:
    """Loads the policy, spreads it over the ranks and prepares its optimizer.

    Raises:
        ServeError: The model cannot be trained or published.
    """
    return Trainer(load_policy(config, accelerator, ranks), config, fused=accelerator.fused_optimizer)
