"""Importance correction between engine and learner: weights and masks of the policy loss, computed once for a batch.

The ratio is that of the old policy as the learner computes it to the behaviour policy as the engine recorded it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollwire.learner.objective import LossSettings
from rollwire.learner.ratios import MAX_LOG_RATIO, RatioLevel, segment_ids
from rollwire.learner.samples import Sample

_ROLL_NAMES: Final = {
    RatioLevel.TOKEN: "token",
    RatioLevel.SEQUENCE: "sequence",
    RatioLevel.SEQUENCE_MEAN: "geometric",
    RatioLevel.SEGMENT_MEAN: "segment",
}

PerToken = NDArray[np.float32]


def correct(
    samples: Sequence[Sample], old: Sequence[PerToken], settings: LossSettings
) -> tuple[list[PerToken] | None, dict[str, float]]:
    """Returns the factor of each token's policy loss, and metrics over the batch.

    Truncated importance sampling: Ionides 2008, J. Comput. Graph. Stat. 17(2); between engine and trainer of language
    models: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".

    Args:
        samples: The batch.
        old: The learner's log-probabilities before the step, float32[L] for each sample.
        settings: Weight and masks.

    Returns:
        float32[L] for each sample, read where it is trained; None when the settings ask for neither weight nor mask.
    """
    logs = [
        (logprobs.astype(np.float64) - sample.logprobs)[sample.loss_mask]
        for sample, logprobs in zip(samples, old, strict=True)
    ]
    levels = {RatioLevel.TOKEN, *(mask.level for mask in settings.importance_masks)}
    if settings.importance_weight is not None:
        levels.add(settings.importance_weight.level)
    ratios = {level: _ratios(level, logs, samples) for level in sorted(levels)}
    metrics = _gap_metrics(np.concatenate(logs), ratios)
    if settings.importance_weight is None and not settings.importance_masks:
        return None, metrics
    factors_N = np.ones(len(ratios[RatioLevel.TOKEN]))
    if (weight := settings.importance_weight) is not None:
        ratio_N = ratios[weight.level]
        factors_N = np.minimum(ratio_N, weight.upper_bound)
        metrics["actor/is_weight_clipfrac"] = float((ratio_N > weight.upper_bound).mean())
    passed_N = np.ones(len(factors_N), dtype=bool)
    for mask in settings.importance_masks:
        own_N = (ratios[mask.level] >= mask.min_ratio) & (ratios[mask.level] <= mask.max_ratio)
        metrics[f"actor/train_infer_{_ROLL_NAMES[mask.level]}_ratio_mask_mean"] = float(own_N.mean())
        passed_N &= own_N
    factors_N = factors_N * passed_N
    metrics["actor/train_infer_final_mask_mean"] = float(passed_N.mean())
    metrics["actor/is_weight_mean"] = float(factors_N.mean())
    metrics["actor/is_weight_ess"] = _effective_share(factors_N)
    return _per_sample(factors_N, samples), metrics


def _ratios(level: RatioLevel, logs: Sequence[NDArray[np.float64]], samples: Sequence[Sample]) -> NDArray[np.float64]:
    """Returns the ratio at a level for every trained token of the batch, float64[N]."""
    found = []
    for log_n, sample in zip(logs, samples, strict=True):
        if level is RatioLevel.SEQUENCE:
            log_n = np.full(len(log_n), log_n.sum())
        elif level is RatioLevel.SEQUENCE_MEAN:
            log_n = np.full(len(log_n), log_n.mean())
        elif level is RatioLevel.SEGMENT_MEAN:
            ids = segment_ids(sample.loss_mask)
            log_n = (np.bincount(ids, weights=log_n) / np.bincount(ids))[ids]
        found.append(log_n)
    return np.exp(np.clip(np.concatenate(found), -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _gap_metrics(log_N: NDArray[np.float64], ratios: dict[RatioLevel, NDArray[np.float64]]) -> dict[str, float]:
    """Returns the ratios and KL(behaviour || old), estimated as k1 and as k3, over the tokens of the batch."""
    bounded = np.clip(log_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    metrics = {
        "actor/train_infer_kl": float(-log_N.mean()),
        "actor/train_infer_k3": float((np.expm1(bounded) - log_N).mean()),
    }
    for level, ratio_N in ratios.items():
        metrics[f"actor/train_infer_ratio_{_ROLL_NAMES[level]}_mean"] = float(ratio_N.mean())
        metrics[f"actor/train_infer_ratio_{_ROLL_NAMES[level]}_max"] = float(ratio_N.max())
    return metrics


def _effective_share(factors_N: NDArray[np.float64]) -> float:
    """Returns Kish's effective sample size (Σw)² / Σw² as a share of the tokens; 0 when every token is masked."""
    squares = float(np.square(factors_N).sum())
    return float(factors_N.sum()) ** 2 / (len(factors_N) * squares) if squares else 0.0


def _per_sample(factors_N: NDArray[np.float64], samples: Sequence[Sample]) -> list[PerToken]:
    ends = np.cumsum([sample.targets for sample in samples])[:-1]
    results = []
    for sample, factors in zip(samples, np.split(factors_N, ends), strict=True):
        spread = np.zeros(len(sample.token_ids), np.float32)
        spread[sample.loss_mask] = factors
        results.append(spread)
    return results
