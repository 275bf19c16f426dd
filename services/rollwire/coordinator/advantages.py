"""Advantage estimators. Pure numpy, float64; docs/algorithms.md gives the formulas with their sources.

An estimator maps a batch, as `BatchView` shows it, to one advantage per trained token. A new one is one function, one
line in `ESTIMATORS`, and its name in `AlgorithmSection.advantage`. One that only compares the scores of a group is a
function of those scores, wrapped by `from_scores`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from rollwire.coordinator.batch_view import BatchView, Floats, Indices, decayed_sums
from rollwire.serving.config.algorithm import AlgorithmSection

STD_EPSILON: Final = 1e-6
"""Added to the standard deviation; scores that spread no more than this have no advantage."""

ZERO_ADVANTAGE: Final = 1e-6
"""A group in which no advantage is larger than this contributes nothing to the gradient."""

VARIANCE_EPSILON: Final = 1e-8
"""Added to the variance when advantages are whitened."""


@dataclass(frozen=True)
class Estimate:
    """What an estimator returns.

    Attributes:
        advantages: Advantage of each trained token.
        episode_rewards: What each episode was worth to the estimator, after its normalisation and without penalties.
        returns: What the critic is to predict at each token; None without a critic.
        spreads: Further values by the name that their mean, maximum and minimum are logged under.
    """

    advantages: Floats
    episode_rewards: Floats
    returns: Floats | None = None
    spreads: Mapping[str, npt.NDArray[np.floating | np.integer]] = field(default_factory=dict)


Estimator = Callable[[BatchView, AlgorithmSection], Estimate]


def from_scores(normalise: Callable[[Floats], Floats]) -> Estimator:
    """Makes an estimator of a function that maps the scores of a group, float64[episodes], to its advantages.

    The advantage of an episode stands at every token that the policy sampled in it; a penalty reduces that of the
    tokens up to where it stands.
    """

    def estimate(view: BatchView, algorithm: AlgorithmSection) -> Estimate:
        reward_E = _within(view.episode_groups, view.episode_scores, normalise)
        return Estimate(
            reward_E[view.token_episodes] - decayed_sums(view.token_penalties, view.token_episodes, 1.0), reward_E
        )

    return estimate


def grpo(scores: Floats) -> Floats:
    """Group-relative advantage: (r - mean) / (std + 1e-6), with the unbiased standard deviation; 0 where std <= 1e-6.

    Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), section 4.1.2, equation for outcome supervision.
    """
    if len(scores) < 2 or (std := float(scores.std(ddof=1))) <= STD_EPSILON:
        return np.zeros_like(scores)
    return (scores - float(scores.mean())) / (std + STD_EPSILON)


def dr_grpo(scores: Floats) -> Floats:
    """GRPO without division by the standard deviation: r - mean.

    The division gives more weight to groups that are nearly solved or nearly lost.

    Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv 2503.20783), section 3.2.
    """
    return scores - float(scores.mean())


def rloo(scores: Floats) -> Floats:
    """Leave-one-out baseline: r - mean of the other episodes of the group.

    Ahmadian et al. 2024, Back to Basics (arXiv 2402.14740), section 3.2. The baseline is independent of the episode,
    so the gradient is unbiased.
    """
    others = (float(scores.sum()) - scores) / (len(scores) - 1)
    return scores - others


def reinforce(scores: Floats) -> Floats:
    """No baseline: r. Williams 1992, Simple statistical gradient-following algorithms."""
    return scores.copy()


def reinforce_plus_plus(view: BatchView, algorithm: AlgorithmSection) -> Estimate:
    """Discounted rewards from each token on, whitened over all tokens of the batch.

    Hu et al. 2025, REINFORCE++ (arXiv 2501.03262).
    """
    to_go_N = decayed_sums(view.token_rewards, view.token_episodes, algorithm.gamma)
    return Estimate(whiten(to_go_N), view.episode_scores.copy())


def step_reinforce(view: BatchView, algorithm: AlgorithmSection) -> Estimate:
    """Discounted rewards from each turn on, the same at all its tokens. Williams 1992, with turns as actions."""
    to_go_T = decayed_sums(view.turn_rewards, view.turn_episodes, algorithm.gamma)
    return Estimate(
        to_go_T[view.token_turns] - decayed_sums(view.token_penalties, view.token_episodes, 1.0),
        view.episode_scores.copy(),
    )


def gigpo(view: BatchView, algorithm: AlgorithmSection) -> Estimate:
    """Advantage of the episode in its group plus that of the turn among all turns of the group that began alike.

    Feng et al. 2025, Group-in-Group Policy Optimization (arXiv 2505.10978): the returns of turns are
    discounted, both parts are normalised by mean and standard deviation. A turn whose state is unknown, or
    that no other turn shares, has the episode's part alone.
    """
    episode_E = _within(view.episode_groups, view.episode_scores, grpo)
    to_go_T = decayed_sums(view.turn_rewards, view.turn_episodes, algorithm.gamma)
    anchors: list[Hashable] = [
        (group, state) if state else turn
        for turn, (group, state) in enumerate(
            zip(view.episode_groups[view.turn_episodes].tolist(), view.turn_states, strict=True)
        )
    ]
    anchor_T = _labels(anchors)
    turn_T = _within(anchor_T, to_go_T, grpo)
    advantage_T = episode_E[view.turn_episodes] + algorithm.step_advantage_weight * turn_T
    return Estimate(
        advantage_T[view.token_turns] - decayed_sums(view.token_penalties, view.token_episodes, 1.0),
        episode_E,
        spreads={
            "critic/episode_rewards_norm": episode_E,
            "critic/step_rewards_norm": turn_T,
            "system/state_batch_size": np.bincount(anchor_T),
        },
    )


def gae(view: BatchView, algorithm: AlgorithmSection) -> Estimate:
    """Generalised advantage estimation over the trained tokens of an episode, across its turns.

    δ_t = r_t + γ V_{t+1} - V_t and A_t = δ_t + γλ A_{t+1}, with V = 0 after the last token; returns are A + V.

    Schulman et al. 2015 (arXiv 1506.02438).
    """
    value_N, owner_N = view.token_values, view.token_episodes
    assert value_N is not None, "the critic has not been asked"
    following = np.zeros_like(value_N)
    same = owner_N[1:] == owner_N[:-1]
    following[:-1][same] = value_N[1:][same]
    delta_N = view.token_rewards + algorithm.gamma * following - value_N
    advantage_N = decayed_sums(delta_N, owner_N, algorithm.gamma * algorithm.gae_lambda)
    return Estimate(advantage_N, view.episode_scores.copy(), returns=advantage_N + value_N)


ESTIMATORS: Final[Mapping[str, Estimator]] = {
    "grpo": from_scores(grpo),
    "dr_grpo": from_scores(dr_grpo),
    "rloo": from_scores(rloo),
    "reinforce": from_scores(reinforce),
    "reinforce_plus_plus": reinforce_plus_plus,
    "step_reinforce": step_reinforce,
    "gigpo": gigpo,
    "gae": gae,
}


def whiten(values: Floats) -> Floats:
    """Returns (x - mean) / sqrt(variance + 1e-8) with the unbiased variance; fewer than two values stay as they are."""
    if len(values) < 2:
        return values.copy()
    scale = float(np.sqrt(values.var(ddof=1) + VARIANCE_EPSILON))
    return (values - float(values.mean())) / scale


def groups_with_signal(view: BatchView, advantage_N: Floats) -> set[int]:
    """Returns the groups in which a token has an advantage."""
    return set(view.episode_groups[view.token_episodes[np.abs(advantage_N) > ZERO_ADVANTAGE]].tolist())


def _within(label: Indices, values: Floats, function: Callable[[Floats], Floats]) -> Floats:
    """Applies a function to the values of each label by themselves."""
    result = np.empty_like(values)
    order = np.argsort(label, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(label[order])) + 1):
        result[members] = function(values[members])
    return result


def _labels(keys: Sequence[Hashable]) -> Indices:
    """Returns a number for each key, the same for equal ones."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)
