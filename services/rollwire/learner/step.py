"""One training step: a pure function of (policy, optimizer, batch)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollwire.learner.batching import Budget, optimizer_step_split
from rollwire.learner.importance import correct
from rollwire.learner.logprob_gap import GAP_PREFIX, logprob_gap
from rollwire.learner.losses import MicroBatchTargets, micro_batch_loss, sample_weights
from rollwire.learner.metrics import average, combine
from rollwire.learner.model import Policy
from rollwire.learner.objective import LossSettings
from rollwire.learner.optimizer import PolicyOptimizer
from rollwire.learner.ratios import token_spans
from rollwire.learner.samples import Sample, at_targets, lay_out
from rollwire.learner.scoring import PerToken, score
from rollwire.learner.shares import passes


@dataclass(frozen=True)
class StepSettings:
    """How a batch is trained on.

    Attributes:
        loss: The objective.
        optimizer_steps: Optimizer steps that the batch is divided into, >= 1.
        shuffle_seed: Seed of the division.
        train_critic: Train the critic as well.
        freeze_policy: Leave the policy as it is.
    """

    loss: LossSettings
    optimizer_steps: int
    shuffle_seed: int
    train_critic: bool = False
    freeze_policy: bool = False


@dataclass(frozen=True)
class _Prepared:
    """A sample and what is computed once before the first optimizer step: old log-probabilities, importance factors."""

    sample: Sample
    old: PerToken
    importance: PerToken | None


def train_step(
    policy: Policy, optimizer: PolicyOptimizer, samples: Sequence[Sample], settings: StepSettings, budget: Budget
) -> dict[str, float]:
    """Trains the policy on a batch and returns metrics by name.

    Optimizer steps whose gradient is not finite are skipped, counted in `actor/skipped_steps`, and not averaged.
    """
    prepared, correction = _prepare(policy, samples, settings.loss, budget)
    reports: list[dict[str, float]] = []
    rates: list[float] = []
    gap: dict[str, float] = {}
    for chosen in optimizer_step_split(len(samples), settings.optimizer_steps, settings.shuffle_seed):
        report = _accumulate(policy, [prepared[index] for index in chosen], settings.loss, budget)
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
        **correction,
        "actor/lr": rates[-1],
        "actor/backward_steps": float(len(rates)),
        "actor/skipped_steps": float(len(rates) - len(reports)),
    }


def _prepare(
    policy: Policy, samples: Sequence[Sample], loss: LossSettings, budget: Budget
) -> tuple[list[_Prepared], dict[str, float]]:
    """Returns the samples with what the ratio and the importance correction need, and the correction's metrics."""
    if not loss.recompute_old_logprobs:
        return [_Prepared(sample, sample.logprobs, None) for sample in samples], {}
    old = [logprobs for logprobs, _ in score(policy, samples, loss.temperature, budget)]
    factors, metrics = correct(samples, old, loss)
    prepared = [
        _Prepared(sample, logprobs, None if factors is None else factors[index])
        for index, (sample, logprobs) in enumerate(zip(samples, old, strict=True))
    ]
    return prepared, metrics


def _accumulate(policy: Policy, prepared: Sequence[_Prepared], loss: LossSettings, budget: Budget) -> dict[str, float]:
    """Adds up the gradient of one optimizer step over micro-batches; returns its metrics."""
    samples = [item.sample for item in prepared]
    weights = sample_weights(loss, [sample.targets for sample in samples])
    step_tokens = sum(sample.targets for sample in samples)
    comparable_tokens = sum(sample.targets for sample in samples if sample.comparable)
    parts = []
    for micro in passes([sample.input_tokens for sample in samples], budget, policy.ranks, packed=policy.packs):
        budget.before_pass()
        rows, chosen = micro.rows, [samples[row] for row in micro.rows]
        targets = _targets([prepared[row] for row in rows], weights[rows] * micro.counts, policy.device)
        batch = lay_out(chosen, policy.device, packed=policy.packs)
        scores = policy.token_scores(batch, loss.temperature, entropy_gradient=loss.entropy_coefficient > 0)
        part, metrics = micro_batch_loss(scores.logprobs, scores.entropies, targets, loss, step_tokens)
        policy.sharding.expect_backward(last=micro.last)
        policy.backward(part)
        metrics |= logprob_gap(scores.logprobs, chosen, comparable_tokens)
        if micro.counts:
            parts.append(dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True)))
    return combine(itertools.chain.from_iterable(policy.ranks.gather_data(parts)))


def _targets(prepared: Sequence[_Prepared], weights: NDArray[np.float64], device: torch.device) -> MicroBatchTargets:
    """Gathers what the loss needs of each trained token."""
    samples = [item.sample for item in prepared]

    def gather(values: Sequence[PerToken]) -> torch.Tensor:
        return torch.from_numpy(at_targets(values, samples)).to(device)

    def gather_given(values: Sequence[PerToken | None]) -> torch.Tensor | None:
        given = [value for value in values if value is not None]
        return gather(given) if len(given) == len(values) else None

    weights_N = np.repeat(weights, [sample.targets for sample in samples]).astype(np.float32)
    return MicroBatchTargets(
        advantages=gather([sample.advantages for sample in samples]),
        old_logprobs=gather([item.old for item in prepared]),
        weights=torch.from_numpy(weights_N).to(device),
        spans=token_spans(samples, device),
        importance=gather_given([item.importance for item in prepared]),
        reference_logprobs=gather_given([sample.reference_logprobs for sample in samples]),
    )
