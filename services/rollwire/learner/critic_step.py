"""One training step of the critic: a pure function of (critic, optimizer, batch)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollwire.learner.batching import Budget, optimizer_step_split
from rollwire.learner.critic import Critic
from rollwire.learner.metrics import average, combine
from rollwire.learner.optimizer import PolicyOptimizer
from rollwire.learner.samples import Sample, at_targets, lay_out
from rollwire.learner.shares import passes
from rollwire.learner.step import StepSettings


def value_loss(values_N: Tensor, returns_N: Tensor, before_N: Tensor | None, clip: float) -> tuple[Tensor, Tensor]:
    """Returns the loss of each token, and where the clip decided it, bool[N].

    ½ · max((V - R)², (clip(V, V_old - c, V_old + c) - R)²), without a clip ½ · (V - R)².

    The clip is that of OpenAI's baselines, see Engstrom et al. 2020 (arXiv 2005.12729).

    Args:
        values_N: Predictions, with gradient.
        returns_N: What they should be.
        before_N: Predictions before the step; needed with a clip.
        clip: Half the width of the range around them; 0 is off.
    """
    error = (values_N - returns_N).square()
    if not clip or before_N is None:
        return 0.5 * error, torch.zeros_like(error, dtype=torch.bool)
    moved = values_N - before_N
    clipped = (before_N + moved.clamp(-clip, clip) - returns_N).square()
    return 0.5 * torch.maximum(error, clipped), (moved.abs() > clip) & (clipped > error)


def train_critic(
    critic: Critic, optimizer: PolicyOptimizer, samples: Sequence[Sample], settings: StepSettings, budget: Budget
) -> dict[str, float]:
    """Trains the critic on a batch and returns metrics by name.

    The batch is divided as for the policy. Optimizer steps whose gradient is not finite are skipped, counted in
    `critic/skipped_steps`, and not averaged.
    """
    reports: list[dict[str, float]] = []
    rates: list[float] = []
    for chosen in optimizer_step_split(len(samples), settings.optimizer_steps, settings.shuffle_seed):
        report = _accumulate(critic, [samples[index] for index in chosen], settings.loss.value_clip, budget)
        outcome = optimizer.step()
        rates.append(outcome.learning_rate)
        if outcome.applied:
            reports.append({**report, "critic/grad_norm": outcome.grad_norm})
    return {
        **average(reports),
        "critic/lr": rates[-1],
        "critic/skipped_steps": float(len(rates) - len(reports)),
    }


def _accumulate(critic: Critic, samples: Sequence[Sample], clip: float, budget: Budget) -> dict[str, float]:
    """Adds up the gradient of one optimizer step, the mean over its tokens; returns its metrics."""
    step_tokens = sum(sample.targets for sample in samples)
    parts = []
    for part in passes([sample.input_tokens for sample in samples], budget, critic.ranks, packed=critic.packs):
        budget.before_pass()
        chosen = [samples[row] for row in part.rows]
        critic.sharding.expect_backward(last=part.last)
        values = critic.values(lay_out(chosen, critic.device, packed=critic.packs))
        returns = _gather([sample.returns for sample in chosen], chosen, critic.device)
        before = _gather([sample.values for sample in chosen], chosen, critic.device) if clip else None
        assert returns is not None, "a request without them is refused"
        loss_N, clipped_N = value_loss(values, returns, before, clip)
        loss = loss_N.sum() / step_tokens
        critic.backward(loss if part.counts else loss * 0)
        with torch.no_grad():
            metrics = {
                "critic/loss": loss.detach(),
                "critic/error": (values - returns).square().sum() / step_tokens,
                "critic/vpred": values.sum() / step_tokens,
            }
            if clip:
                metrics["critic/clipfrac"] = clipped_N.sum() / step_tokens
        if part.counts:
            parts.append(dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True)))
    return combine(itertools.chain.from_iterable(critic.ranks.gather_data(parts)))


def _gather(values: Sequence[np.ndarray | None], samples: Sequence[Sample], device: torch.device) -> Tensor | None:
    """Returns values at the targets of samples; None when a sample has none."""
    given = [value for value in values if value is not None]
    return torch.from_numpy(at_targets(given, samples)).to(device) if len(given) == len(values) else None
