"""The record of an episode as it grows: tokens, masks, log-probabilities, versions, turns. Pure: no I/O, no clock."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollwire.rollout.engine import Piece
from rollwire.v1 import environment_pb2, trajectory_pb2

_Aggregation = environment_pb2.MetricAggregation


@dataclass
class _OpenTurn:
    """A turn whose outcome is not known yet."""

    sequence: int
    prompt_begin: int
    response_begin: int
    observation_digest: bytes
    response_end: int = 0
    stop_reason: trajectory_pb2.StopReason.ValueType = trajectory_pb2.STOP_REASON_UNSPECIFIED


@dataclass
class EpisodeRecord:
    """Builds `Trajectory.sequences`, `Trajectory.turns`, score and metrics.

    The order of calls is prompt, response, outcome, and again.

    Attributes:
        sequences: Token sequences; the last one is being extended.
        turns: Completed turns.
    """

    sequences: list[trajectory_pb2.TokenSequence] = field(default_factory=list)
    turns: list[trajectory_pb2.Turn] = field(default_factory=list)
    _open: _OpenTurn | None = None

    @property
    def turn_index(self) -> int:
        """Number of completed turns: the index of the turn being played."""
        return len(self.turns)

    def token_ids(self) -> list[int]:
        """Returns the tokens of the sequence being extended."""
        return list(self.sequences[-1].token_ids) if self.sequences else []

    def add_prompt(self, token_ids: Sequence[int], *, new_sequence: bool, observation: str | None = None) -> None:
        """Starts a turn with tokens that the policy is shown, and what the environment showed if that is known."""
        assert self._open is None, "the turn before has no outcome"
        if new_sequence or not self.sequences:
            self.sequences.append(trajectory_pb2.TokenSequence())
        sequence = self.sequences[-1]
        begin = len(sequence.token_ids)
        append_prompt(sequence, token_ids)
        digest = b"" if observation is None else hashlib.sha256(observation.encode()).digest()
        self._open = _OpenTurn(len(self.sequences) - 1, begin, begin + len(token_ids), digest)

    def add_response(self, pieces: Sequence[Piece]) -> None:
        """Adds what the policy answered, each piece drawn by the version that it names."""
        turn = self._open
        assert turn is not None and turn.response_end == 0, "a response needs a prompt"
        sequence = self.sequences[turn.sequence]
        append_response(sequence, pieces)
        turn.response_end = len(sequence.token_ids)
        turn.stop_reason = pieces[-1].stop_reason

    def add_outcome(self, step: environment_pb2.StepResponse) -> None:
        """Completes the turn with what the environment returned."""
        turn = self._open
        assert turn is not None and turn.response_end > 0, "an outcome needs a response"
        self.turns.append(
            trajectory_pb2.Turn(
                index=len(self.turns),
                sequence=turn.sequence,
                prompt=trajectory_pb2.TokenRange(begin=turn.prompt_begin, end=turn.response_begin),
                response=trajectory_pb2.TokenRange(begin=turn.response_begin, end=turn.response_end),
                reward=step.reward,
                terminated=step.terminated,
                truncated=step.truncated and not step.terminated,
                metrics=step.metrics,
                stop_reason=turn.stop_reason,
                observation_digest=turn.observation_digest,
            )
        )
        self._open = None

    @property
    def score(self) -> float:
        """Sum of the rewards."""
        return sum(turn.reward for turn in self.turns)

    def metrics(self, aggregation: Mapping[str, _Aggregation.ValueType]) -> dict[str, float]:
        """Returns each metric's value for the episode, aggregated as the environment declares."""
        values: dict[str, list[float]] = {}
        for turn in self.turns:
            for name, value in turn.metrics.items():
                values.setdefault(name, []).append(value)
        return {
            name: aggregate(found, aggregation.get(name, environment_pb2.METRIC_AGGREGATION_MEAN))
            for name, found in sorted(values.items())
        }


def append_prompt(sequence: trajectory_pb2.TokenSequence, token_ids: Sequence[int]) -> None:
    """Appends tokens that the policy was shown."""
    sequence.token_ids.extend(token_ids)
    sequence.loss_mask.extend([False] * len(token_ids))
    sequence.logprobs.extend([0.0] * len(token_ids))


def append_response(sequence: trajectory_pb2.TokenSequence, pieces: Sequence[Piece]) -> None:
    """Appends tokens that the policy sampled, each piece drawn by the version that it names."""
    spans: list[trajectory_pb2.VersionSpan] = []
    for piece in pieces:
        begin = len(sequence.token_ids)
        sequence.token_ids.extend(piece.token_ids)
        sequence.loss_mask.extend([True] * len(piece.token_ids))
        sequence.logprobs.extend(piece.logprobs)
        end = len(sequence.token_ids)
        if spans and spans[-1].version == piece.version:
            spans[-1].range.end = end
        elif end > begin:
            span = trajectory_pb2.TokenRange(begin=begin, end=end)
            spans.append(trajectory_pb2.VersionSpan(range=span, version=piece.version))
    sequence.version_spans.extend(spans)


def aggregate(values: Sequence[float], how: _Aggregation.ValueType) -> float:
    """Returns one value for the turns that reported a metric; `values` is not empty and in the order of turns."""
    if how == environment_pb2.METRIC_AGGREGATION_SUM:
        return sum(values)
    if how == environment_pb2.METRIC_AGGREGATION_LAST:
        return values[-1]
    if how == environment_pb2.METRIC_AGGREGATION_FIRST:
        return values[0]
    if how == environment_pb2.METRIC_AGGREGATION_MAX:
        return max(values)
    if how == environment_pb2.METRIC_AGGREGATION_MIN:
        return min(values)
    return sum(values) / len(values)
