"""What an engine was asked for while episodes were played, read from their trajectories. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollwire.rollout.engine import GenerationRequest, Sampling
from rollwire.rollout.seeds import derive_seed
from rollwire.v1 import trajectory_pb2


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One turn: the request as the engine got it, and the tokens that it drew."""

    request: GenerationRequest
    drawn: list[int]


RecordedEpisode = list[RecordedTurn]
"""The turns of an episode, in order: a request can only be made when the one before has ended."""


def recorded_episode(trajectory: trajectory_pb2.Trajectory, max_episode_tokens: int) -> RecordedEpisode:
    """Returns the requests that an episode made of its engine.

    Args:
        trajectory: The episode.
        max_episode_tokens: Limit that it was played with.
    """
    settings = trajectory.sampling
    sampling = Sampling(
        settings.temperature,
        settings.top_p,
        settings.top_k,
        settings.max_tokens,
        frozenset(settings.stop_token_ids),
        settings.logprob_mode,
    )
    turns = []
    for turn in trajectory.turns:
        token_ids = trajectory.sequences[turn.sequence].token_ids
        request = GenerationRequest(
            list(token_ids[: turn.response.begin]),
            sampling,
            derive_seed(trajectory.sampling_seed, turn.index),
            max_episode_tokens,
            cache_key=trajectory.trajectory_id,
        )
        turns.append(RecordedTurn(request, list(token_ids[turn.response.begin : turn.response.end])))
    return turns


def drawn_tokens(groups: Sequence[Sequence[RecordedEpisode]]) -> int:
    """Returns the number of tokens that the policy drew."""
    return sum(len(turn.drawn) for group in groups for episode in group for turn in episode)


def same_turns(
    recorded: Sequence[Sequence[RecordedEpisode]], replayed: Sequence[Sequence[Sequence[list[int]]]]
) -> float:
    """Returns the share of turns for which two engines drew the same tokens.

    Args:
        recorded: Groups of episodes of turns.
        replayed: The tokens drawn in each turn when the same requests were made again.
    """
    same = [
        turn.drawn == drawn
        for group, group_again in zip(recorded, replayed, strict=True)
        for episode, episode_again in zip(group, group_again, strict=True)
        for turn, drawn in zip(episode, episode_again, strict=True)
    ]
    return sum(same) / len(same)
