"""Advantage estimators over the episodes of a group. Pure numpy.

An estimator maps the scores of a group's episodes, shape [episodes], to one advantage per episode, shape [episodes],
in float64. The advantage of an episode applies to every token that the policy sampled in it. A new estimator is one
function and one line in `ESTIMATORS` (and its name in the configuration's `algorithm.advantage`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]
Estimator = Callable[[Scores], Scores]

STD_EPSILON: Final = 1e-6
"""Added to the standard deviation; scores that spread no more than this have no advantage."""

ZERO_ADVANTAGE: Final = 1e-6
"""A group in which no advantage is larger than this contributes nothing to the gradient."""


def grpo(scores: Scores) -> Scores:
    """Group-relative advantage: (r - mean) / (std + 1e-6), with the unbiased standard deviation; 0 where std <= 1e-6.

    Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), section 4.1.2, equation for outcome supervision.
    """
    std = float(scores.std(ddof=1))
    if std <= STD_EPSILON:
        return np.zeros_like(scores)
    return (scores - float(scores.mean())) / (std + STD_EPSILON)


def dr_grpo(scores: Scores) -> Scores:
    """GRPO without division by the standard deviation: r - mean.

    The division gives more weight to groups that are nearly solved or nearly lost.

    Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv 2503.20783), section 3.2.
    """
    return scores - float(scores.mean())


def rloo(scores: Scores) -> Scores:
    """Leave-one-out baseline: r - mean of the other episodes of the group.

    Ahmadian et al. 2024, Back to Basics (arXiv 2402.14740), section 3.2. The baseline is independent of the episode,
    so the gradient is unbiased.
    """
    others = (float(scores.sum()) - scores) / (len(scores) - 1)
    return scores - others


def reinforce(scores: Scores) -> Scores:
    """No baseline: r. Williams 1992, Simple statistical gradient-following algorithms."""
    return scores.copy()


ESTIMATORS: Final[Mapping[str, Estimator]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
}


def group_advantages(estimator: str, scores: npt.ArrayLike) -> Scores:
    """Returns the advantage of each episode of one group.

    Args:
        estimator: Name in `ESTIMATORS`.
        scores: Score of each episode, shape [episodes]; finite. Estimators that compare need at least two.
    """
    return ESTIMATORS[estimator](np.asarray(scores, dtype=np.float64))


def is_without_signal(advantages: Scores) -> bool:
    """Tells whether a group contributes nothing, because all of its advantages are zero."""
    return bool(np.all(np.abs(advantages) <= ZERO_ADVANTAGE))
