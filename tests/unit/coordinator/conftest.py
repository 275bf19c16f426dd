"""Builders of messages for the coordinator's tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from rollwire.v1 import trajectory_pb2, weights_pb2

TrajectoryMaker = Callable[..., trajectory_pb2.Trajectory]


def _make_trajectory(
    group: str = "g00000000",
    episode: int = 0,
    score: float = 0.0,
    *,
    attempt: int = 0,
    tag: str = "FrozenLake",
    turns: Sequence[tuple[int, int]] = ((3, 2),),
    versions: Sequence[int] = (0,),
    lineage: str = "line",
    metrics: Mapping[str, float] | None = None,
) -> trajectory_pb2.Trajectory:
    """A trajectory whose turns have (prompt, response) tokens; each takes the next version, the last one repeats."""
    trajectory = trajectory_pb2.Trajectory(
        trajectory_id=f"{group}.{episode}.{attempt}",
        group_id=group,
        episode_index=episode,
        attempt=attempt,
        environment_tag=tag,
        environment_seed=7,
        score=score,
        metrics=dict(metrics or {}),
    )
    sequence = trajectory.sequences.add()
    for index, (prompt, response) in enumerate(turns):
        begin = len(sequence.token_ids)
        middle, end = begin + prompt, begin + prompt + response
        sequence.token_ids.extend(range(begin + 1, end + 1))
        sequence.loss_mask.extend([False] * prompt + [True] * response)
        sequence.logprobs.extend([0.0] * prompt + [-0.5] * response)
        span = sequence.version_spans.add(
            version=weights_pb2.WeightVersion(lineage=lineage, step=versions[min(index, len(versions) - 1)])
        )
        span.range.begin, span.range.end = middle, end
        turn = trajectory.turns.add(index=index, reward=score if index == len(turns) - 1 else 0.0)
        turn.prompt.begin, turn.prompt.end = begin, middle
        turn.response.begin, turn.response.end = middle, end
    return trajectory


@pytest.fixture
def make_trajectory() -> TrajectoryMaker:
    return _make_trajectory
