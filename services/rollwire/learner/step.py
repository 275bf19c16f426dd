"""One training step: a pure function of (policy, optimizer, batch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollwire.learner.batching import Budget, optimizer_step_split
from rollwire.learner.logprob_gap import GAP_PREFIX, logprob_gap
from rollwire.learner.losses import LossSettings, MicroBatchTargets, micro_batch_loss, sample_weights
from rollwire.learner.metrics import average, combine
from rollwire.learner.model import Policy
from rollwire.learner.optimizer import PolicyOptimizer
from rollwire.learner.samples import Sample, at_targets, pad
from rollwire.learner.scoring import PerToken, score


@dataclass(frozen=True)
class StepSettings:
    """How a batch is trained on.

    Attributes:
        loss: The objective.
        optimizer_steps: Optimizer steps that the batch is divided into, >= 1.
        shuffle_seed: Seed of the division.
    """

    loss: LossSettings
    optimizer_steps: int
    shuffle_seed: int


def train_step(
    policy: Policy, optimizer: PolicyOptimizer, samples: Sequence[Sample], settings: StepSettings, budget: Budget
) -> dict[str, float]:
    """Trains on a batch and returns metrics by name.

    Optimizer steps whose gradient is not finite are skipped, counted in `actor/skipped_steps`, and not averaged.
    """
    old = [sample.logprobs for sample in samples]
    if settings.loss.recompute_old_logprobs:
        old = [logprobs for logprobs, _ in score(policy, samples, settings.loss.temperature, budget)]
    reports: list[dict[str, float]] = []
    rates: list[float] = []
    gap: dict[str, float] = {}
    for chosen in optimizer_step_split(len(samples), settings.optimizer_steps, settings.shuffle_seed):
        report = _accumulate(policy, [samples[i] for i in chosen], [old[i] for i in chosen], settings.loss, budget)
        # Later optimizer steps would measure what the earlier ones changed, not how engine and learner differ.
        found = {name: report.pop(name) for name in list(report) if name.startswith(GAP_PREFIX)}
        gap = gap if rates else found
        outcome = optimizer.step()
        rates.append(outcome.learning_rate)
        if outcome.applied:
            reports.append({**report, "actor_train/grad_norm": outcome.grad_norm})
    return {
        **average(reports),
        **gap,
        "actor/lr": rates[-1],
        "actor/backward_steps": float(len(rates)),
        "actor/skipped_steps": float(len(rates) - len(reports)),
    }


def _accumulate(
    policy: Policy, samples: Sequence[Sample], old: Sequence[PerToken], loss: LossSettings, budget: Budget
) -> dict[str, float]:
    """Adds up the gradient of one optimizer step over micro-batches; returns its metrics."""
    weights = sample_weights(loss.aggregation, [sample.targets for sample in samples])
    step_tokens = sum(sample.targets for sample in samples)
    comparable_tokens = sum(sample.targets for sample in samples if sample.comparable)
    parts = []
    for rows in budget.divide([sample.input_tokens for sample in samples]):
        budget.before_pass()
        chosen = [samples[row] for row in rows]
        targets = _targets(chosen, [old[row] for row in rows], weights[rows], policy.device)
        scores = policy.token_scores(
            pad(chosen, policy.device), loss.temperature, entropy_gradient=loss.entropy_coefficient > 0
        )
        part, metrics = micro_batch_loss(scores.logprobs, scores.entropies, targets, loss, step_tokens)
        part.backward()  # type: ignore[no-untyped-call]
        metrics |= logprob_gap(scores.logprobs, chosen, comparable_tokens)
        parts.append(dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True)))
    return combine(parts)


def _targets(
    samples: Sequence[Sample], old: Sequence[PerToken], weights: NDArray[np.float64], device: torch.device
) -> MicroBatchTargets:
    """Gathers what the loss needs of each trained token."""
    weights_N = np.repeat(weights, [sample.targets for sample in samples]).astype(np.float32)
    return MicroBatchTargets(
        advantages=torch.from_numpy(at_targets([sample.advantages for sample in samples], samples)).to(device),
        old_logprobs=torch.from_numpy(at_targets(old, samples)).to(device),
        weights=torch.from_numpy(weights_N).to(device),
    )
