"""Divergence of the policy to the reference as the coordinator uses it: penalties of rewards, a steered coefficient.

Pure. What the learner adds to its loss is its own affair.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from rollwire.coordinator.batch_view import Floats
from rollwire.serving.config.algorithm import KlSection

MAX_LOG_RATIO: Final = 20.0
"""Log-ratios are bounded by this before `exp`."""

MAX_RELATIVE_ERROR: Final = 0.2
"""Bound of the relative error that the coefficient follows."""


def divergence(estimator: str, logprob_N: Floats, reference_N: Floats) -> Floats:
    """Returns the estimated divergence at each token.

    With d = lp - lp_ref: d (k1), d²/2 (k2), exp(-d) + d - 1 (k3); J. Schulman, "Approximating KL divergence", 2020.

    Args:
        estimator: `k1`, `k2` or `k3`.
        logprob_N: Log-probabilities of the policy that drew the tokens.
        reference_N: Log-probabilities of the reference.
    """
    d = logprob_N - reference_N
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * np.square(d)
    return np.expm1(np.minimum(-d, MAX_LOG_RATIO)) + d


def next_coefficient(coefficient: float, measured: float, episodes: int, section: KlSection) -> float:
    """Returns the coefficient of the next step: it rises while the divergence is above the target, else it falls.

    β' = β · (1 + clip(measured / target - 1, ±0.2) · episodes / horizon)

    Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences (arXiv 1909.08593), with the gain
    per episode.

    Args:
        coefficient: Coefficient of this step.
        measured: Divergence per token in this step.
        episodes: Episodes of this step.
        section: Target and horizon; without a target the coefficient stays.
    """
    if section.target == 0:
        return coefficient
    error = min(max(measured / section.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return max(0.0, coefficient * (1 + error * episodes / section.horizon))
