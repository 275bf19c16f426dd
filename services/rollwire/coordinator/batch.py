"""From the groups of a step to the samples that the learner trains on. Pure.

One sample per token sequence. The advantage of an episode stands at every position that the policy sampled. Groups
whose advantages are all zero are left out when the filter is on: they were consumed but contribute nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollwire.coordinator.advantages import group_advantages, is_without_signal
from rollwire.coordinator.comparable import Comparable
from rollwire.v1 import learner_pb2, trajectory_pb2


@dataclass(frozen=True)
class Episode:
    """A consumed trajectory and its advantage."""

    trajectory: trajectory_pb2.Trajectory
    advantage: float


@dataclass
class Batch:
    """What one training step consumes.

    Attributes:
        trained: Episodes whose samples go to the learner, by group index and episode index.
        filtered: Episodes of groups that the zero-variance filter left out.
        samples: The learner's samples, in the order of `trained`.
        filtered_groups: Number of groups left out.
    """

    trained: list[Episode] = field(default_factory=list)
    filtered: list[Episode] = field(default_factory=list)
    samples: list[learner_pb2.TrainSample] = field(default_factory=list)
    filtered_groups: int = 0

    @property
    def consumed(self) -> list[Episode]:
        """All episodes of the step."""
        return [*self.trained, *self.filtered]


def build_batch(
    groups: Sequence[Sequence[trajectory_pb2.Trajectory]],
    estimator: str,
    *,
    filter_zero_variance: bool,
    comparable: Comparable | None = None,
) -> Batch:
    """Computes advantages and builds the samples.

    Args:
        groups: The step's groups by ascending index; each holds its trajectories by episode index.
        estimator: Name of the advantage estimator.
        filter_zero_variance: Leave groups out whose advantages are all zero.
        comparable: Marks the samples whose log-probabilities can be compared with the learner's; None marks none.
    """
    batch = Batch()
    for group in groups:
        advantages = group_advantages(estimator, [trajectory.score for trajectory in group])
        episodes = [Episode(item, float(value)) for item, value in zip(group, advantages, strict=True)]
        if filter_zero_variance and is_without_signal(advantages):
            batch.filtered.extend(episodes)
            batch.filtered_groups += 1
            continue
        batch.trained.extend(episodes)
        for episode in episodes:
            batch.samples.extend(_samples(episode, comparable))
    return batch


def _samples(episode: Episode, comparable: Comparable | None) -> list[learner_pb2.TrainSample]:
    """Returns one sample for each sequence in which a token can be trained."""
    trajectory = episode.trajectory
    samples = []
    for position, sequence in enumerate(trajectory.sequences):
        mask = np.fromiter(sequence.loss_mask, dtype=bool, count=len(sequence.loss_mask))
        mask[0] = False  # nothing precedes the first token, so it has no log-probability
        if not mask.any():
            continue
        whole = len(trajectory.sequences) == 1
        samples.append(
            learner_pb2.TrainSample(
                sample_id=trajectory.trajectory_id if whole else f"{trajectory.trajectory_id}#{position}",
                token_ids=sequence.token_ids,
                loss_mask=mask.tolist(),
                advantages=np.where(mask, episode.advantage, 0.0).tolist(),
                logprobs=sequence.logprobs,
                comparable_logprobs=comparable is not None and comparable.covers(trajectory, sequence),
            )
        )
    return samples
