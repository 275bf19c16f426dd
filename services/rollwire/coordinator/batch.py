"""From the groups of a step to the samples that the learner trains on. Pure.

One sample per token sequence. Groups whose advantages are all zero are left out when the filter is on: they were
consumed but contribute nothing. `select_batch` decides what is trained; `credit.assign` then fills in the advantages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rollwire.coordinator.advantages import ESTIMATORS, groups_with_signal
from rollwire.coordinator.batch_view import BatchView, Floats, make_view
from rollwire.coordinator.comparable import Comparable
from rollwire.serving.config.algorithm import AlgorithmSection
from rollwire.v1 import learner_pb2, trajectory_pb2

Masks = list[npt.NDArray[np.bool_]]
"""For each sequence of a trajectory the positions that are trained."""


@dataclass
class Batch:
    """What one training step consumes.

    Attributes:
        trained: Trajectories whose samples go to the learner, by group index and episode index.
        filtered: Trajectories of groups that the filter left out.
        view: `trained` as estimators see them.
        samples: The learner's samples, in the order of `trained`.
        filtered_groups: Number of groups left out.
        kl_coefficient: Coefficient of the divergence to the reference in this step.
        metrics: What the assignment of advantages has to report.
    """

    trained: list[trajectory_pb2.Trajectory]
    filtered: list[trajectory_pb2.Trajectory]
    view: BatchView
    samples: list[learner_pb2.TrainSample]
    filtered_groups: int
    kl_coefficient: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def consumed(self) -> list[trajectory_pb2.Trajectory]:
        """All trajectories of the step."""
        return [*self.trained, *self.filtered]

    def at_tokens(self, values: Sequence[npt.NDArray[np.float32]]) -> Floats:
        """Returns values that stand at the positions of each sample as float64[N], as the view has its tokens."""
        parts = [value[np.array(sample.loss_mask)] for value, sample in zip(values, self.samples, strict=True)]
        return np.concatenate([np.zeros(0), *parts])

    def at_positions(self, values_N: Floats) -> list[npt.NDArray[np.float32]]:
        """Returns values of the view's tokens as float32[L] for each sample, 0 where nothing is trained."""
        masks = [np.array(sample.loss_mask) for sample in self.samples]
        ends = np.cumsum([int(mask.sum()) for mask in masks])[:-1]
        results = [np.zeros(len(mask), np.float32) for mask in masks]
        for result, mask, part in zip(results, masks, np.split(values_N, ends) if masks else [], strict=True):
            result[mask] = part
        return results


def select_batch(
    groups: Sequence[Sequence[trajectory_pb2.Trajectory]],
    algorithm: AlgorithmSection,
    comparable: Comparable | None = None,
) -> Batch:
    """Leaves out what carries no signal and builds the samples, without advantages.

    Args:
        groups: The step's groups by ascending index; each holds its trajectories by episode index.
        algorithm: Estimator and filter.
        comparable: Marks the samples whose log-probabilities can be compared with the learner's; None marks none.
    """
    everything = [trajectory for group in groups for trajectory in group]
    masks = [_masks(trajectory) for trajectory in everything]
    view = make_view(everything, masks, algorithm.reward_clip)
    kept = set(view.episode_groups.tolist())
    if algorithm.filter_zero_variance and algorithm.advantage != "gae":
        kept = groups_with_signal(view, ESTIMATORS[algorithm.advantage](view, algorithm).advantages)
    chosen = [index for index, group in enumerate(view.episode_groups.tolist()) if group in kept]
    if len(chosen) < len(everything):
        view = make_view([everything[i] for i in chosen], [masks[i] for i in chosen], algorithm.reward_clip)
    trained = set(chosen)
    return Batch(
        trained=[everything[index] for index in chosen],
        filtered=[trajectory for index, trajectory in enumerate(everything) if index not in trained],
        view=view,
        samples=[sample for index in chosen for sample in _samples(everything[index], masks[index], comparable)],
        filtered_groups=len(groups) - len(kept),
    )


def _masks(trajectory: trajectory_pb2.Trajectory) -> Masks:
    masks = []
    for sequence in trajectory.sequences:
        mask = np.fromiter(sequence.loss_mask, dtype=bool, count=len(sequence.loss_mask))
        mask[0] = False  # nothing precedes the first token, so it has no log-probability
        masks.append(mask)
    return masks


def _samples(
    trajectory: trajectory_pb2.Trajectory, masks: Masks, comparable: Comparable | None
) -> list[learner_pb2.TrainSample]:
    """Returns one sample for each sequence in which a token can be trained."""
    whole = len(trajectory.sequences) == 1
    return [
        learner_pb2.TrainSample(
            sample_id=trajectory.trajectory_id if whole else f"{trajectory.trajectory_id}#{position}",
            token_ids=sequence.token_ids,
            loss_mask=mask.tolist(),
            logprobs=sequence.logprobs,
            comparable_logprobs=comparable is not None and comparable.covers(trajectory, sequence),
        )
        for position, (sequence, mask) in enumerate(zip(trajectory.sequences, masks, strict=True))
        if mask.any()
    ]
