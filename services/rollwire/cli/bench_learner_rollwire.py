"""Rollwire's side of `rollwire bench learner`: the learner's training step, without service and without publishing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollwire.cli.bench_learner_batch import Rollout
from rollwire.cli.bench_learner_side import CLIP, LEARNING_RATE, MAX_GRAD_NORM, Setup
from rollwire.learner.batching import Budget, pass_cost_tokens
from rollwire.learner.distributed import Ranks
from rollwire.learner.model import Policy
from rollwire.learner.objective import LossSettings
from rollwire.learner.optimizer import PolicyOptimizer
from rollwire.learner.samples import Sample
from rollwire.learner.scoring import score
from rollwire.learner.sharding import spread
from rollwire.learner.step import StepSettings, train_step
from rollwire.serving.accelerator import prepare
from rollwire.serving.config.sections import LearnerSection, OptimizerSection

_STEPS = 1_000_000


class RollwireSide:
    """See `bench_learner_side.Side`."""

    def __init__(self, model: Any, setup: Setup, batch: list[Rollout]) -> None:
        self._policy = _policy(model, setup)
        settings = OptimizerSection(learning_rate=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM)
        fused = prepare(device=setup.device).fused_optimizer
        self._optimizer = PolicyOptimizer(model, settings, _STEPS, fused=fused)
        self.optimizer = self._optimizer.adamw
        self._samples = [as_sample(number, item) for number, item in enumerate(batch)]
        self._settings = StepSettings(LossSettings(clip_low=CLIP, clip_high=CLIP), optimizer_steps=1, shuffle_seed=0)
        self._budget = _budget(setup)

    def step(self) -> float:
        """Updates the model by the batch and returns the loss."""
        metrics = train_step(self._policy, self._optimizer, self._samples, self._settings, self._budget)
        return metrics["actor/total_loss"]


def as_sample(number: int, rollout: Rollout) -> Sample:
    """Returns a rollout as the learner takes it."""
    length = len(rollout.token_ids)
    return Sample(
        f"sample-{number}",
        rollout.token_ids,
        np.arange(length) >= rollout.prompt_tokens,
        np.full(length, rollout.advantage, np.float32),
        rollout.logprobs,
    )


def own_logprobs(model: Any, setup: Setup, batch: list[Rollout]) -> list[NDArray[np.float32]]:
    """Returns the model's log-probabilities of each rollout's tokens, float32[L] with zeros in the prompt."""
    samples = [as_sample(number, item) for number, item in enumerate(batch)]
    return [logprobs for logprobs, _ in score(_policy(model, setup), samples, 1.0, _budget(setup))]


def _policy(model: Any, setup: Setup) -> Policy:
    section = LearnerSection.model_validate({"gradient_checkpointing": setup.gradient_checkpointing})
    ranks = Ranks()
    sharding = spread(model.eval(), section, ranks)
    return Policy(model, torch.device(setup.device), setup.precision, ranks, sharding)


def _budget(setup: Setup) -> Budget:
    return Budget(setup.micro_batch_tokens, pass_cost_tokens(setup.device))
