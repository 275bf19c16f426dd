"""`TrajectoryBuilder`: makes a `Trajectory` from what `RolloutService.Generate` drew. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

from rollwire.rpc.ids import new_id
from rollwire.v1 import coordinator_pb2, rollout_pb2, trajectory_pb2


class TrajectoryBuilder:
    """Records one episode: turn after turn, then `build`.

    Args:
        terms: What the run wants, as `TrajectoryPusher.terms` returns it.
        environment_tag: Tag of the run's entry with `source: pushed`.
        group_id: Group of the episode, unique for ever: `new_id("group")`.
        episode_index: Position in the group, from 0.
        environment_seed: Seed of the task, equal within the group; below 2**63.

    Attributes:
        token_ids: Tokens of the present sequence, prompt and responses: a next prompt that begins with exactly these
            continues it.
    """

    def __init__(
        self,
        terms: coordinator_pb2.GetSubmissionTermsResponse,
        environment_tag: str,
        *,
        group_id: str,
        episode_index: int,
        environment_seed: int,
    ) -> None:
        self.token_ids: list[int] = []
        self._trajectory = trajectory_pb2.Trajectory(
            trajectory_id=new_id(group_id),
            group_id=group_id,
            episode_index=episode_index,
            environment_tag=environment_tag,
            environment_seed=environment_seed,
            sampling=terms.sampling,
            tokenizer_hash=terms.tokenizer_hash,
            template_hash=terms.template_hash,
        )

    def add_turn(
        self,
        prompt_ids: Sequence[int],
        pieces: Sequence[rollout_pb2.GenerateResponse],
        *,
        reward: float,
        terminated: bool = False,
        truncated: bool = False,
        metrics: Mapping[str, float] | None = None,
        observation: str | None = None,
    ) -> None:
        """Adds a turn.

        Args:
            prompt_ids: All token ids that `Generate` was given. Where they do not begin with `token_ids` exactly, they
                start another sequence: nothing is tokenised again.
            pieces: Everything that `Generate` answered.
            reward: Reward of the response.
            terminated: The environment reached its end.
            truncated: The environment cut the episode.
            metrics: Metrics of the turn.
            observation: What the environment showed; estimators that compare turns need it.

        Raises:
            ValueError: Nothing was drawn, the generation was aborted, or the reward or a metric is not finite.
        """
        if not any(piece.token_ids for piece in pieces):
            raise ValueError("pieces hold no tokens; a turn needs a response")
        if pieces[-1].stop_reason == trajectory_pb2.STOP_REASON_ABORTED:
            raise ValueError("the generation was aborted, as by a weight update; generate the turn again")
        _check_finite("reward", reward)
        for name, value in (metrics or {}).items():
            _check_finite(f"metrics[{name!r}]", value)
        trajectory, known = self._trajectory, len(self.token_ids)
        if not trajectory.sequences or list(prompt_ids[:known]) != self.token_ids:
            trajectory.sequences.add()
            self.token_ids, known = [], 0
        sequence = trajectory.sequences[-1]
        new = list(prompt_ids[known:])
        _extend(sequence, new, [0.0] * len(new), sampled=False)
        turn = trajectory.turns.add(
            index=len(trajectory.turns),
            sequence=len(trajectory.sequences) - 1,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            metrics=metrics or {},
            stop_reason=pieces[-1].stop_reason,
        )
        turn.prompt.begin, turn.prompt.end = known, len(sequence.token_ids)
        turn.response.begin = len(sequence.token_ids)
        for piece in pieces:
            _add_piece(sequence, piece)
        turn.response.end = len(sequence.token_ids)
        if observation is not None:
            turn.observation_digest = hashlib.sha256(observation.encode()).digest()
        self.token_ids = list(sequence.token_ids)

    def build(self, metrics: Mapping[str, float] | None = None) -> trajectory_pb2.Trajectory:
        """Returns the trajectory.

        Args:
            metrics: Metrics of the episode; `success` is shown as success rate.

        Raises:
            ValueError: It has no turn, or a metric is not finite.
        """
        if not self._trajectory.turns:
            raise ValueError("the episode has no turn; add one with add_turn")
        for name, value in (metrics or {}).items():
            _check_finite(f"metrics[{name!r}]", value)
        found = trajectory_pb2.Trajectory()
        found.CopyFrom(self._trajectory)
        found.score = sum(turn.reward for turn in found.turns)
        found.metrics.update(metrics or {})
        ended = found.turns[-1].terminated
        found.end = trajectory_pb2.EPISODE_END_TERMINATED if ended else trajectory_pb2.EPISODE_END_TRUNCATED
        return found


def _check_finite(what: str, value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(
            f"{what} is {value}; allowed: a finite number. Leave out episodes that failed: do not submit them"
        )


def _add_piece(sequence: trajectory_pb2.TokenSequence, piece: rollout_pb2.GenerateResponse) -> None:
    begin = len(sequence.token_ids)
    _extend(sequence, piece.token_ids, piece.logprobs, sampled=True)
    end = len(sequence.token_ids)
    last = sequence.version_spans[-1] if sequence.version_spans else None
    if last is not None and last.range.end == begin and last.version == piece.version:
        last.range.end = end
    elif end > begin:
        span = sequence.version_spans.add(version=piece.version)
        span.range.begin, span.range.end = begin, end


def _extend(
    sequence: trajectory_pb2.TokenSequence, token_ids: Sequence[int], logprobs: Sequence[float], *, sampled: bool
) -> None:
    sequence.token_ids.extend(token_ids)
    sequence.loss_mask.extend([sampled] * len(token_ids))
    sequence.logprobs.extend(logprobs)
