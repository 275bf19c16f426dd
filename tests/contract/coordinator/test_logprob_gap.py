"""A run stops when engine and learner give the same tokens different log-probabilities."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollwire.coordinator.errors import RunError
from rollwire.rpc.errors import Reason, exhausted
from rollwire.v1 import learner_pb2


def reporting(mean: float) -> Any:
    """Returns what a learner reports whose gap has this mean."""

    def gap(samples: list[learner_pb2.TrainSample]) -> dict[str, float]:
        fresh = [sample for sample in samples if sample.comparable_logprobs]
        if not fresh:
            return {}
        found = {"tokens": 2.0 * len(fresh), "mean": mean, "max": 2 * mean, "k3": mean**2 / 2}
        return {f"actor/logprob_gap_{name}": value for name, value in found.items()}

    return gap


def logged(world: Any, name: str) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (world.run_dir.path / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[name]) for line in lines if name in line]


async def test_samples_of_the_learners_version_are_marked_and_the_gap_is_logged(world: Any) -> None:
    world.learner.gap = reporting(1e-5)
    await world.run()
    assert all(sample.comparable_logprobs for _, samples in world.learner.steps for sample in samples)
    assert logged(world, "actor/logprob_gap_mean") == [(0, 1e-5), (1, 1e-5), (2, 1e-5)]
    assert world.rollout.generated == [], "without staleness nothing is drawn for it"


async def test_too_large_a_gap_ends_the_run_after_it_was_logged(world: Any) -> None:
    world.learner.gap = reporting(0.5)
    with pytest.raises(RunError) as caught:
        await world.run()
    text = str(caught.value)
    assert "step 0" in text and "0.5 nats" in text and "cpu in float32" in text and "selftest weights" in text
    assert logged(world, "actor/logprob_gap_mean") == [(0, 0.5)]
    assert len(world.learner.steps) == 1 and world.rollout.updates == [0], "what may be ruined is not pushed"


@pytest.mark.parametrize("setting", ["0.6", "0"])
async def test_the_bound_can_be_raised_and_switched_off(world: Any, setting: str) -> None:
    world.learner.gap = reporting(0.5)
    summary = await world.run(f"algorithm.max_logprob_gap={setting}")
    assert summary.steps == 3


async def test_the_bound_is_that_of_the_least_exact_device(world: Any) -> None:
    world.learner.gap, world.learner.device = reporting(3e-3), "cuda"
    assert (await world.run()).steps == 3
    world.learner.__init__()
    world.learner.gap = reporting(3e-3)
    with pytest.raises(RunError, match="cpu in float32"):
        await world.run()


async def test_steps_without_fresh_samples_are_measured_by_drawing_tokens(two_rollouts: Any) -> None:
    world = two_rollouts
    world.learner.gap = reporting(1e-5)
    for rollout in world.rollouts:
        rollout.plays_with = lambda rollout=rollout: max(rollout.version.step - 1, 0)
    world.learner.scores_as = -1.00005
    await world.run("max_staleness=1", "run.max_steps=5")
    gaps = dict(logged(world, "actor/logprob_gap_mean"))
    assert gaps[0] == 1e-5, "in step 0 all samples are fresh"
    later = [step for step in range(1, 5) if step in gaps]
    assert later and all(gaps[step] == pytest.approx(5e-5, rel=1e-2) for step in later)
    assert all(sample.comparable_logprobs for samples in world.learner.scored for sample in samples)
    drawn = [request for rollout in world.rollouts for request in rollout.generated]
    assert {tuple(request.token_ids) for request in drawn} == {(1, 2)}, "prompts of earlier episodes"
    assert all(rollout.generated for rollout in world.rollouts), "the servers take turns"


async def test_a_gap_that_only_drawing_shows_ends_the_run(world: Any) -> None:
    world.rollout.plays_with = lambda: max(world.rollout.version.step - 1, 0)
    world.learner.scores_as = -3.0
    with pytest.raises(RunError, match=r"0\.667 nats on average, 2 at most"):
        await world.run("max_staleness=1", "run.max_steps=20")


async def test_a_server_that_cannot_draw_costs_the_measurement_and_not_the_run(world: Any) -> None:
    def refuse() -> None:
        raise exhausted(Reason.REQUESTS_EXHAUSTED, "too many", 1.0)

    world.rollout.plays_with = lambda: max(world.rollout.version.step - 1, 0)
    world.rollout.before_generate = refuse
    assert (await world.run("max_staleness=1", "run.max_steps=4")).steps == 4
    assert logged(world, "actor/logprob_gap_mean") == [(0, 0.0)], "that step's samples were fresh"
