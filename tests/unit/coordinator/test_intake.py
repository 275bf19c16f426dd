from __future__ import annotations

from collections.abc import Callable

import pytest

from rollwire.coordinator.intake import ProtocolError, check_trajectory, oldest_step
from rollwire.v1 import trajectory_pb2

Maker = Callable[..., trajectory_pb2.Trajectory]
Spoil = Callable[[trajectory_pb2.Trajectory], object]


def check(trajectory: trajectory_pb2.Trajectory) -> None:
    check_trajectory(trajectory, "g00000000", 0, {0, 1})


def test_a_good_trajectory_passes(make_trajectory: Maker) -> None:
    check(make_trajectory(turns=[(3, 2), (4, 1)]))


def clear_spans(trajectory: trajectory_pb2.Trajectory) -> None:
    del trajectory.sequences[0].version_spans[:]


def overlap(trajectory: trajectory_pb2.Trajectory) -> None:
    trajectory.sequences[0].version_spans.append(trajectory.sequences[0].version_spans[0])


SPOILS: dict[str, Spoil] = {
    "has no trajectory_id": lambda item: item.ClearField("trajectory_id"),
    "claims group 'other'": lambda item: setattr(item, "group_id", "other"),
    "attempt 3": lambda item: setattr(item, "attempt", 3),
    "episode 2; asked for was attempt 0, episodes \\[0, 1\\]": lambda item: setattr(item, "episode_index", 2),
    "score nan": lambda item: setattr(item, "score", float("nan")),
    "score inf": lambda item: setattr(item, "score", float("inf")),
    "0 sequences": lambda item: item.ClearField("sequences"),
    "0 turns": lambda item: item.ClearField("turns"),
    "there is no sequence 4": lambda item: setattr(item.turns[0], "sequence", 4),
    "turn 0: its reward is nan": lambda item: setattr(item.turns[0], "reward", float("nan")),
    "its response \\[3, 9\\) lies outside": lambda item: setattr(item.turns[0].response, "end", 9),
    "before the last turn's": lambda item: item.turns.append(item.turns[0]),
    "2 sampled tokens, the responses of its turns have 1": lambda item: setattr(item.turns[0].response, "end", 4),
    "lengths 6, 5 and 5": lambda item: item.sequences[0].token_ids.append(1),
    "lengths 5, 5 and 4": lambda item: item.sequences[0].logprobs.pop(),
    "cover 0 tokens, the loss mask has 2": clear_spans,
    "overlaps another one": overlap,
    "outside the 5 tokens": lambda item: setattr(item.sequences[0].version_spans[0].range, "end", 6),
    "names no version": lambda item: item.sequences[0].version_spans[0].version.ClearField("lineage"),
    "log-probability of a sampled token is not finite": lambda item: item.sequences[0].logprobs.__setitem__(
        4, float("-inf")
    ),
}


@pytest.mark.parametrize("text", SPOILS)
def test_contradictions_are_refused(make_trajectory: Maker, text: str) -> None:
    trajectory = make_trajectory()
    SPOILS[text](trajectory)
    with pytest.raises(ProtocolError, match=text):
        check(trajectory)


def test_the_oldest_token_counts(make_trajectory: Maker) -> None:
    trajectory = make_trajectory(turns=[(1, 1), (1, 1), (1, 1)], versions=[5, 3, 6])
    assert oldest_step(trajectory, "line", 6) == 3


def test_tokens_of_another_lineage_or_of_the_future_are_refused(make_trajectory: Maker) -> None:
    with pytest.raises(ProtocolError, match="other@1"):
        oldest_step(make_trajectory(lineage="other", versions=[1]), "line", 1)
    with pytest.raises(ProtocolError, match="newest version is 1"):
        oldest_step(make_trajectory(versions=[2]), "line", 1)
