"""Token-in token-out episodes: tokenizer, prompts, engine and environment server together."""

from __future__ import annotations

import asyncio
from typing import Any

import engine_kit as kit
import pytest

from rollwire.v1 import rollout_pb2, trajectory_pb2

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


def record(result: rollout_pb2.RunGroupResponse) -> dict[str, Any]:
    """Returns what an episode was: everything but its name and the time it took; log-probabilities apart."""
    trajectory = result.trajectory
    return {
        "tokens": [list(sequence.token_ids) for sequence in trajectory.sequences],
        "mask": [list(sequence.loss_mask) for sequence in trajectory.sequences],
        "turns": [turn.SerializeToString(deterministic=True) for turn in trajectory.turns],
        "score": trajectory.score,
        "metrics": sorted(trajectory.metrics.items()),
        "end": trajectory.end,
        "hashes": (trajectory.tokenizer_hash, trajectory.template_hash),
    }


def logprobs(results: list[rollout_pb2.RunGroupResponse]) -> list[float]:
    return [value for result in results for sequence in result.trajectory.sequences for value in sequence.logprobs]


async def test_the_same_seed_gives_the_same_record(bench: Any) -> None:
    """Whatever else the server does, and although the second time its prefixes may be cached already."""
    first = await bench.play()
    again, *others = await asyncio.gather(
        bench.play(), *(bench.play(sampling_seed=seed, environment_seed=seed) for seed in range(100, 103))
    )
    assert all(result.HasField("trajectory") for results in (first, again, *others) for result in results)
    assert [record(result) for result in first] == [record(result) for result in again]
    assert logprobs(first) == pytest.approx(logprobs(again), abs=kit.LOGPROB_BOUNDS[bench.device, "float32"])
    other = await bench.play(sampling_seed=6)
    assert [record(result)["tokens"] for result in other] != [record(result)["tokens"] for result in first]


async def test_records_are_scored_as_the_learner_scores_them(bench: Any) -> None:
    results = await bench.play(environment_seed=3)
    sequences = [sequence for result in results for sequence in result.trajectory.sequences]
    assert max(bench.learner.logprob_gaps(sequences)) < kit.LOGPROB_BOUNDS[bench.device, "float32"]
    assert {turn.stop_reason for result in results for turn in result.trajectory.turns} <= {
        trajectory_pb2.STOP_REASON_STOP_TOKEN,
        trajectory_pb2.STOP_REASON_MAX_TOKENS,
    }
    assert len({tuple(record(result)["tokens"][0]) for result in results}) > 2


async def test_greedy_episodes_are_the_same_for_every_engine(benches: Any) -> None:
    """Of the policy that ships; every engine's server has its own environment server, and they agree as well."""
    records = []
    for bench in benches.values():
        await bench.reset()
        settings = trajectory_pb2.SamplingSettings(temperature=0, max_tokens=48)
        groups = [await bench.play(episodes=1, environment_seed=seed, sampling=settings) for seed in range(6)]
        records.append([record(result) for group in groups for result in group])
    assert all(found == records[0] for found in records)
    assert len({len(found["turns"]) for found in records[0]}) > 1
