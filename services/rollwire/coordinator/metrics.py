"""Scalars of a step and of a validation, under ROLL's names wherever the quantity is the same. Pure.

Scores and environment metrics are over all episodes that the step consumed, with groups that the zero-variance filter
left out: without them the curve would be pulled towards the middle. Rewards, advantages and tokens are over the
episodes that are trained.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from rollwire.coordinator.batch import Batch
from rollwire.coordinator.groups import Tally
from rollwire.v1 import trajectory_pb2

Metrics = dict[str, float]

THROUGHPUT_WINDOW_STEPS: Final = 5


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of one trajectory.

    Attributes:
        prompt: Tokens before the first response.
        response: Tokens that the policy sampled.
        non_prompt: Tokens from the first response on, later prompts included.
        total: All tokens of all sequences.
    """

    prompt: int
    response: int
    non_prompt: int
    total: int


def count_tokens(trajectory: trajectory_pb2.Trajectory) -> TokenCounts:
    """Counts the tokens of a trajectory; tokens that a later sequence repeats count once, except in `total`."""
    turns = trajectory.turns
    prompt = turns[0].prompt.end - turns[0].prompt.begin
    new = sum(turn.prompt.end - turn.prompt.begin + turn.response.end - turn.response.begin for turn in turns)
    return TokenCounts(
        prompt=prompt,
        response=sum(turn.response.end - turn.response.begin for turn in turns),
        non_prompt=new - prompt,
        total=sum(len(sequence.token_ids) for sequence in trajectory.sequences),
    )


def batch_metrics(batch: Batch) -> Metrics:
    """Returns scores, tokens and environment metrics of a step's batch; `Batch.metrics` has rewards and advantages."""
    consumed = batch.consumed
    scores = [trajectory.score for trajectory in consumed]
    consumed_tokens = [count_tokens(trajectory) for trajectory in consumed]
    trained_tokens = [count_tokens(trajectory) for trajectory in batch.trained]
    metrics = {
        **_spread("critic/score", scores),
        **_spread("rollout/score", scores),
        **_token_spreads("tokens", trained_tokens),
        **_token_spreads("rollout", consumed_tokens),
        **environment_metrics(consumed),
        "scheduler/group_filter_count": float(batch.filtered_groups),
    }
    if consumed_tokens:
        metrics["env/response_length"] = float(np.mean([tokens.response for tokens in consumed_tokens]))
    return metrics


def environment_metrics(trajectories: Sequence[trajectory_pb2.Trajectory], prefix: str = "env") -> Metrics:
    """Returns `<prefix>/<Tag>/<metric>`: each episode metric averaged over the episodes of the tag that have it.

    `num_actions` is the number of turns, unless the environment reports a metric of that name.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        episode = {"num_actions": float(len(trajectory.turns)), **trajectory.metrics}
        for name, value in episode.items():
            values[f"{prefix}/{trajectory.environment_tag}/{name}"].append(value)
    return {name: float(np.mean(found)) for name, found in values.items()}


def validation_metrics(trajectories: Sequence[trajectory_pb2.Trajectory], kind: str = "val") -> Metrics:
    """Returns scores over all episodes and per tag, and environment metrics, of one validation.

    Args:
        trajectories: Completed episodes.
        kind: Prefix of the names: `val` or `val_greedy`.
    """
    by_tag: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        by_tag[trajectory.environment_tag].append(trajectory.score)
    metrics = _spread(f"{kind}/score", [trajectory.score for trajectory in trajectories])
    for tag, scores in by_tag.items():
        metrics.update(_spread(f"{kind}/{tag}/score", scores))
    metrics.update(environment_metrics(trajectories, f"{kind}/env"))
    metrics[f"{kind}/episodes"] = float(len(trajectories))
    return metrics


def scheduler_metrics(tally: Tally, groups_dropped: int) -> Metrics:
    """Returns how many episodes were requested, completed and failed, by reason, since the run began.

    At every step requested = completed + failed + in flight.

    Args:
        tally: Counts of training episodes.
        groups_dropped: Groups given up.
    """
    metrics = {
        "scheduler/requested": float(tally.requested),
        "scheduler/completed": float(tally.completed),
        "scheduler/failed": float(tally.failed.total()),
        "scheduler/in_flight": float(tally.in_flight),
        "scheduler/groups_dropped": float(groups_dropped),
    }
    metrics.update({f"scheduler/failures/{reason}": float(count) for reason, count in tally.failed.items()})
    return metrics


def staleness_metrics(lags: Sequence[int]) -> Metrics:
    """Returns by how many versions the oldest token of each episode lags, mean and max."""
    return {"staleness/mean": float(np.mean(lags)), "staleness/max": float(max(lags))} if lags else {}


class Throughput:
    """Tokens per second over the last few steps, `system/tps`."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=THROUGHPUT_WINDOW_STEPS)

    def add(self, tokens: int, seconds: float) -> float:
        """Adds a step and returns the present rate.

        Args:
            tokens: All tokens of the episodes consumed, prompts included.
            seconds: Wall time of the step.
        """
        self._steps.append((tokens, seconds))
        total_s = sum(seconds for _, seconds in self._steps)
        return sum(tokens for tokens, _ in self._steps) / max(total_s, 1e-9)


def finite_metrics(metrics: Mapping[str, float]) -> Metrics:
    """Returns the metrics as Python floats, without values that are not finite."""
    plain = {name: float(value) for name, value in metrics.items()}
    return {name: value for name, value in plain.items() if math.isfinite(value)}


def _spread(prefix: str, values: Sequence[float] | npt.NDArray[np.float64]) -> Metrics:
    if len(values) == 0:
        return {}
    return {
        f"{prefix}/mean": float(np.mean(values)),
        f"{prefix}/max": float(np.max(values)),
        f"{prefix}/min": float(np.min(values)),
    }


def _token_spreads(prefix: str, counts: Iterable[TokenCounts]) -> Metrics:
    found = list(counts)
    metrics: Metrics = {}
    for name in ("response", "prompt", "non_prompt"):
        metrics.update(_spread(f"{prefix}/{name}_length", [float(getattr(item, name)) for item in found]))
    return metrics
