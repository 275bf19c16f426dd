"""Checks on a trajectory that arrives from a rollout server. Pure.

A trajectory that contradicts itself is a defect of the server that sent it: it must neither be trained nor be counted
as the failure of an environment, so it ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from rollwire.v1 import trajectory_pb2

LEFT_BEHIND: Final = -(1 << 32)
"""Stands for the step of weights that the run has left: older than any bound."""


MAX_REWARD: Final = 1e9
"""Largest size of a reward that comes from outside: sums and squares of such numbers stay finite wherever they go."""


class ProtocolError(Exception):
    """A server sent something that the contract rules out."""


def check_trajectory(
    trajectory: trajectory_pb2.Trajectory, group_id: str, attempt: int, pending: Collection[int]
) -> None:
    """Checks that a trajectory belongs to an attempt and that its arrays agree.

    Args:
        trajectory: What arrived.
        group_id: Group that was asked for.
        attempt: Attempt that was asked for.
        pending: Episodes of the attempt that have no result yet.

    Raises:
        ProtocolError: It does not, or they do not.
    """
    name = f"trajectory {trajectory.trajectory_id!r} of group {group_id}"
    if not trajectory.trajectory_id:
        raise ProtocolError(f"a trajectory of group {group_id} has no trajectory_id")
    if trajectory.group_id != group_id or trajectory.attempt != attempt or trajectory.episode_index not in pending:
        raise ProtocolError(
            f"{name} claims group {trajectory.group_id!r}, attempt {trajectory.attempt}, episode "
            f"{trajectory.episode_index}; asked for was attempt {attempt}, episodes {sorted(pending)}"
        )
    if not math.isfinite(trajectory.score):
        raise ProtocolError(f"{name} has the score {trajectory.score}; it must be finite")
    if not trajectory.sequences or not trajectory.turns:
        raise ProtocolError(f"{name} has {len(trajectory.sequences)} sequences and {len(trajectory.turns)} turns")
    for position, sequence in enumerate(trajectory.sequences):
        problem = _sequence_problem(sequence)
        if problem:
            raise ProtocolError(f"{name}, sequence {position}: {problem}")
    problem = _turn_problem(trajectory)
    if problem:
        raise ProtocolError(f"{name}, {problem}")


def _turn_problem(trajectory: trajectory_pb2.Trajectory) -> str:
    """Returns what is wrong with the turns, or an empty text: in order, their responses hold all sampled tokens."""
    covered = [np.zeros(len(sequence.token_ids), dtype=bool) for sequence in trajectory.sequences]
    before = (0, 0)
    for turn in trajectory.turns:
        begin, end = turn.response.begin, turn.response.end
        if turn.sequence >= len(covered):
            return f"turn {turn.index}: there is no sequence {turn.sequence}"
        if not math.isfinite(turn.reward):
            return f"turn {turn.index}: its reward is {turn.reward}; it must be finite"
        if not begin <= end <= len(covered[turn.sequence]) or (turn.sequence, begin) < before:
            return (
                f"turn {turn.index}: its response [{begin}, {end}) lies outside its sequence or before the last turn's"
            )
        covered[turn.sequence][begin:end] = True
        before = (turn.sequence, end)
    for position, (sequence, found) in enumerate(zip(trajectory.sequences, covered, strict=True)):
        if list(sequence.loss_mask) != found.tolist():
            return (
                f"sequence {position}: the loss mask has {sum(sequence.loss_mask)} sampled tokens, the responses of "
                f"its turns have {found.sum()}, or others"
            )
    return ""


def _sequence_problem(sequence: trajectory_pb2.TokenSequence) -> str:
    """Returns what is wrong with a sequence, or an empty text."""
    length = len(sequence.token_ids)
    if length == 0 or len(sequence.loss_mask) != length or len(sequence.logprobs) != length:
        return (
            f"token_ids, loss_mask and logprobs have lengths {length}, {len(sequence.loss_mask)} and "
            f"{len(sequence.logprobs)}; they must be equal and not 0"
        )
    mask = np.fromiter(sequence.loss_mask, dtype=bool, count=length)
    covered = np.zeros(length, dtype=bool)
    for span in sequence.version_spans:
        begin, end = span.range.begin, span.range.end
        if not begin <= end <= length or covered[begin:end].any():
            return f"version span [{begin}, {end}) overlaps another one or lies outside the {length} tokens"
        if not span.version.lineage:
            return f"version span [{begin}, {end}) names no version"
        covered[begin:end] = True
    if not np.array_equal(covered, mask):
        return f"version spans cover {int(covered.sum())} tokens, the loss mask has {int(mask.sum())}, or others"
    if not np.isfinite(np.fromiter(sequence.logprobs, dtype=np.float32, count=length)[mask]).all():
        return "a log-probability of a sampled token is not finite"
    return ""


def oldest_step(trajectory: trajectory_pb2.Trajectory, lineage: str, current_step: int) -> int:
    """Returns the step of the oldest weights that produced a token of the trajectory.

    Args:
        trajectory: A checked trajectory.
        lineage: Lineage being trained.
        current_step: Step of the newest published version.

    Raises:
        ProtocolError: A token comes from another lineage or from a version that does not exist yet.
    """
    oldest = current_step
    for sequence in trajectory.sequences:
        for span in sequence.version_spans:
            if span.version.lineage != lineage or span.version.step > current_step:
                raise ProtocolError(
                    f"trajectory {trajectory.trajectory_id!r} has tokens of version {span.version.lineage}@"
                    f"{span.version.step}; the run trains {lineage} and its newest version is {current_step}"
                )
            oldest = min(oldest, span.version.step)
    return oldest


def oldest_of_stored(trajectories: Sequence[trajectory_pb2.Trajectory], lineage: str, current_step: int) -> int:
    """Returns the step of the oldest weights of trajectories that were stored earlier.

    `LEFT_BEHIND` when a token comes from weights that the run has left.
    """
    try:
        return min(oldest_step(trajectory, lineage, current_step) for trajectory in trajectories)
    except ProtocolError:
        return LEFT_BEHIND
