"""Gives every trained token of a batch its advantage, and says what came of it. Pure.

Order: reward clip (in `batch_view`), penalty for the divergence, estimator, whitening, advantage clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rollwire.coordinator.advantages import ESTIMATORS, Estimate, whiten
from rollwire.coordinator.batch import Batch
from rollwire.coordinator.batch_view import Floats
from rollwire.coordinator.divergence import divergence
from rollwire.serving.config.algorithm import AlgorithmSection

PerSample = Sequence[npt.NDArray[np.float32]]
"""float32[L] for each sample."""


def assign(
    batch: Batch,
    algorithm: AlgorithmSection,
    *,
    kl_coefficient: float = 0.0,
    reference: PerSample | None = None,
    values: PerSample | None = None,
) -> None:
    """Fills in the batch's samples and metrics.

    Args:
        batch: As `select_batch` returns it.
        algorithm: Estimator and what is done to rewards and advantages.
        kl_coefficient: Coefficient of the divergence in this step.
        reference: Log-probabilities of the reference; needed when `algorithm.kl.coefficient` is positive.
        values: The critic's predictions; needed by estimators with a critic.
    """
    batch.kl_coefficient = kl_coefficient
    if not batch.samples:
        return
    view = batch.view
    if reference is not None:
        kl_N = _measure(batch, algorithm, reference)
        if algorithm.kl.apply_to == "reward":
            view = replace(view, token_penalties=kl_coefficient * kl_N)
        else:
            _fill(batch, "reference_logprobs", reference)
    if values is not None:
        view = replace(view, token_values=batch.at_tokens(values))
        if algorithm.value_clip:
            _fill(batch, "values", values)
    estimate = ESTIMATORS[algorithm.advantage](view, algorithm)
    if estimate.returns is not None:
        _fill(batch, "returns", batch.at_positions(estimate.returns))
    advantage_N = whiten(estimate.advantages) if algorithm.whiten_advantages else estimate.advantages
    if algorithm.advantage_clip:
        bounded = advantage_N.clip(-algorithm.advantage_clip, algorithm.advantage_clip)
        batch.metrics["critic/advantage_clip_frac"] = float((bounded != advantage_N).mean())
        advantage_N = bounded
    if algorithm.reward_clip:
        rewards = [turn.reward for trajectory in batch.trained for turn in trajectory.turns]
        batch.metrics["critic/reward_clip_frac"] = float((np.abs(rewards) > algorithm.reward_clip).mean())
    _fill(batch, "advantages", batch.at_positions(advantage_N))
    batch.view = view
    batch.metrics |= _spread("critic/advantages", advantage_N) | _estimate_metrics(batch, estimate)


def _measure(batch: Batch, algorithm: AlgorithmSection, reference: PerSample) -> Floats:
    """Returns the divergence at each token, and notes it."""
    logprob_N = batch.at_tokens([np.array(sample.logprobs, np.float32) for sample in batch.samples])
    reference_N = batch.at_tokens(reference)
    kl_N = divergence(algorithm.kl.estimator, logprob_N, reference_N)
    batch.metrics |= {
        "critic/kl": float(kl_N.mean()),
        "critic/kl_coef": batch.kl_coefficient,
        "critic/old_log_prob/mean": float(logprob_N.mean()),
        "critic/ref_log_prob/mean": float(reference_N.mean()),
    }
    return kl_N


def _estimate_metrics(batch: Batch, estimate: Estimate) -> dict[str, float]:
    """Returns what episodes were worth, and how well the critic predicted it."""
    view = batch.view
    penalty_E = np.bincount(view.token_episodes, weights=view.token_penalties, minlength=len(view.episode_scores))
    metrics = _spread("critic/rewards", estimate.episode_rewards - penalty_E)
    for name, found in estimate.spreads.items():
        metrics |= _spread(name, found.astype(np.float64))
    if estimate.returns is not None and view.token_values is not None:
        metrics |= _spread("critic/returns", estimate.returns) | _spread("critic/values", view.token_values)
        variance = float(estimate.returns.var())
        if variance > 0:
            metrics["critic/vf_explained_var"] = 1 - float((estimate.returns - view.token_values).var()) / variance
    return metrics


def _spread(prefix: str, values: Floats) -> dict[str, float]:
    return {
        f"{prefix}/mean": float(values.mean()),
        f"{prefix}/max": float(values.max()),
        f"{prefix}/min": float(values.min()),
    }


def _fill(batch: Batch, name: str, values: PerSample) -> None:
    for sample, found in zip(batch.samples, values, strict=True):
        getattr(sample, name).extend(found.tolist())
