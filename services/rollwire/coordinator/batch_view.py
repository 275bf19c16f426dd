"""A batch as arrays, the form in which advantage estimators see it. Pure numpy, float64.

Suffixes: E episodes, T turns, N trained tokens, each flat and in the order of play.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rollwire.v1 import trajectory_pb2

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchView:
    """What a step's episodes were worth and where their trained tokens are.

    Attributes:
        episode_groups: Group of each episode, counted from 0.
        episode_scores: Score of each episode, the sum of its turns' rewards.
        turn_episodes: Episode of each turn, ascending.
        turn_rewards: Reward of each turn.
        turn_states: Digest of what each turn began with; empty where unknown.
        token_turns: Turn of each token, ascending.
        token_penalties: What the reward of each token is reduced by, for the divergence to a reference.
        token_values: Return that the critic predicts from each token on; None without a critic.
    """

    episode_groups: Indices
    episode_scores: Floats
    turn_episodes: Indices
    turn_rewards: Floats
    turn_states: Sequence[bytes]
    token_turns: Indices
    token_penalties: Floats
    token_values: Floats | None = None

    @cached_property
    def token_episodes(self) -> Indices:
        """Episode of each token."""
        return self.turn_episodes[self.token_turns]

    @cached_property
    def token_rewards(self) -> Floats:
        """Reward of each token, the penalty subtracted: that of a turn stands at its last token.

        A turn without a trained token passes its reward to the token before; rewards before an episode's first trained
        token count for none, for no token can have caused them.
        """
        rewards = -self.token_penalties
        last = np.searchsorted(self.token_turns, np.arange(len(self.turn_episodes)), side="right") - 1
        owned = last >= 0
        owned[owned] = self.token_episodes[last[owned]] == self.turn_episodes[owned]
        np.add.at(rewards, last[owned], self.turn_rewards[owned])
        return rewards


def decayed_sums(values: Floats, owner: Indices, decay: float) -> Floats:
    """Returns y with y_t = values_t + decay · y_{t+1} within each owner.

    Args:
        values: Any values.
        owner: As long; ascending, so that what belongs together is contiguous.
        decay: Factor.
    """
    if len(values) == 0:
        return values.copy()
    begins = np.searchsorted(owner, owner, side="left")
    position = np.arange(len(owner)) - begins
    grid = np.zeros((int(owner[-1]) + 1, int(position.max()) + 1))
    grid[owner, position] = values
    for column in range(grid.shape[1] - 2, -1, -1):
        grid[:, column] += decay * grid[:, column + 1]
    sums: Floats = grid[owner, position]
    return sums


def make_view(
    trajectories: Sequence[trajectory_pb2.Trajectory], masks: Sequence[Sequence[npt.NDArray[np.bool_]]], clip: float
) -> BatchView:
    """Returns the view of some trajectories, without penalties and values.

    Args:
        trajectories: Episode after episode, those of a group together.
        masks: For each trajectory and each of its sequences the positions that are trained.
        clip: Rewards of turns are clipped to within ± this; 0 is off.
    """
    groups: dict[str, int] = {}
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    first_turn = np.cumsum([0, *(len(trajectory.turns) for trajectory in trajectories)])
    episode_T = np.repeat(np.arange(len(trajectories)), np.diff(first_turn))
    reward_T = np.array([turn.reward for turn in turns])
    score_E = np.array([trajectory.score for trajectory in trajectories])
    if clip:
        reward_T = reward_T.clip(-clip, clip)
        score_E = np.bincount(episode_T, weights=reward_T, minlength=len(trajectories))
    turn_N = [
        first_turn[episode] + _turns_of_tokens(trajectory, own)
        for episode, (trajectory, own) in enumerate(zip(trajectories, masks, strict=True))
    ]
    tokens = np.concatenate([np.zeros(0, np.int64), *turn_N])
    return BatchView(
        episode_groups=np.array(
            [groups.setdefault(item.group_id, len(groups)) for item in trajectories], dtype=np.int64
        ),
        episode_scores=score_E,
        turn_episodes=episode_T,
        turn_rewards=reward_T,
        turn_states=[turn.observation_digest for turn in turns],
        token_turns=tokens,
        token_penalties=np.zeros(len(tokens)),
    )


def _turns_of_tokens(
    trajectory: trajectory_pb2.Trajectory, masks: Sequence[npt.NDArray[np.bool_]]
) -> npt.NDArray[np.int64]:
    """Returns for each trained token, sequence after sequence, the position of its turn among the trajectory's."""
    owners = [np.zeros(len(mask), np.int64) for mask in masks]
    for index, turn in enumerate(trajectory.turns):
        owners[turn.sequence][turn.response.begin : turn.response.end] = index
    return np.concatenate([owner[mask] for owner, mask in zip(owners, masks, strict=True)])
