"""A whole run against small servers: order, ledger, event file, scalars."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rollwire.client.coordinator import CoordinatorClient
from rollwire.coordinator.seeds import environment_seed, shuffle_seed
from rollwire.rpc.digests import samples_digest
from rollwire.v1 import coordinator_pb2, learner_pb2, trajectory_pb2


def query(world: Any, text: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(world.run_dir.path / "run.db") as connection:
        return connection.execute(text).fetchall()


async def test_three_steps(world: Any) -> None:
    summary = await world.run()
    assert (summary.steps, summary.totals.samples, summary.stop_cause) == (3, 12, None)
    assert summary.export_path == "/exports/final"
    assert world.rollout.updates == [0, 1, 2, 3], "version 0 goes out before the first rollout"
    assert [step for step, _, _ in world.notes.validations] == [0, 2, 3]
    assert world.status.state == coordinator_pb2.RUN_STATE_FINISHED
    assert not world.run_dir.address_file.exists()

    training = sorted(
        (request for request in world.rollout.requests if request.group_id.startswith("g")),
        key=lambda request: request.group_id,
    )
    assert [request.group_id for request in training] == [f"g{index:08d}" for index in range(6)]
    assert [request.required_version.step for request in training] == [0, 0, 1, 1, 2, 2]
    assert training[3].environment_seed == environment_seed(42, "train", "FrozenLake", 3)
    assert list(training[0].environment_targets) == [world.hosts[world.environment].address]

    headers = [header for header, _ in world.learner.steps]
    assert [header.base_version.step for header in headers] == [0, 1, 2]
    assert headers[1].shuffle_seed == shuffle_seed(42, 1)
    assert headers[0].loss.policy_loss == "ppo_clip" and headers[0].loss.temperature == 1.0
    ids = [[sample.sample_id for sample in samples] for _, samples in world.learner.steps]
    assert ids[1] == [f"g{group:08d}.{episode}.0" for group in (2, 3) for episode in (0, 1)]


async def test_the_ledger_holds_every_trajectory_and_step(world: Any) -> None:
    await world.run()
    assert query(world, "SELECT state FROM run") == [("finished",)]
    assert query(world, "SELECT COUNT(*) FROM trajectories WHERE record IS NOT NULL") == [(12,)]
    steps = query(world, "SELECT step, version_before, version_after, digest, state FROM steps ORDER BY step")
    expected = [samples_digest(samples) for _, samples in world.learner.steps]
    assert steps == [(step, step, step + 1, expected[step], "committed") for step in range(3)]
    assert query(world, "SELECT step, COUNT(*) FROM step_trajectories GROUP BY step") == [(0, 4), (1, 4), (2, 4)]
    assert query(world, "SELECT DISTINCT state FROM groups") == [("consumed",)]
    assert [row[0] for row in query(world, "SELECT step FROM versions ORDER BY step")] == [0, 1, 2, 3]
    assert query(world, "SELECT step, COUNT(*) FROM validations GROUP BY step") == [(0, 3), (2, 3), (3, 3)]


async def test_the_event_file_has_rolls_names(world: Any) -> None:
    await world.run()
    (path,) = world.run_dir.event_dir.glob("events.out.tfevents.*")
    events = EventAccumulator(str(path))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= {
        "time/step_total",
        "time/step_rollout",
        "time/step_train",
        "time/step_adv",
        "time/step_model_update",
        "time/step_log",
        "time/step_val",
        "system/samples",
        "system/tps",
        "system/step",
        "critic/score/mean",
        "critic/score/max",
        "critic/score/min",
        "critic/rewards/mean",
        "critic/advantages/mean",
        "tokens/response_length/mean",
        "tokens/prompt_length/max",
        "tokens/non_prompt_length/min",
        "env/FrozenLake/success",
        "env/FrozenLake/num_actions",
        "env/response_length",
        "rollout/score/mean",
        "actor/pg_loss",
        "val/score/mean",
        "val/FrozenLake/score/mean",
        "val/env/FrozenLake/success",
        "scheduler/group_filter_count",
        "weights/sync_seconds",
        "weights/sync_bytes",
        "weights/pause_seconds",
        "staleness/max",
        "system/rss_mib/coordinator",
        "system/rss_mib/rollout",
        "system/rss_mib/learner",
    }
    assert [(event.step, event.value) for event in events.Scalars("system/samples")] == [(0, 4), (1, 8), (2, 12)]
    assert [event.step for event in events.Scalars("val/score/mean")] == [0, 2, 3]
    assert [event.step for event in events.Scalars("time/step_total")] == [0, 1, 2]
    lines = [json.loads(line) for line in (world.run_dir.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 0, 1, 2, 2, 3]
    for line in lines:
        if "scheduler/requested" in line:
            assert line["scheduler/requested"] == line["scheduler/completed"] + line["scheduler/failed"]


def documented_names() -> list[re.Pattern[str]]:
    """Patterns of the names in docs/metrics.md, all with a slash; braces are alternatives, angles are free."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text()
    patterns = []
    for name in re.findall(r"^\| `([^`]+/[^`]+)` \|", page, flags=re.MULTILINE):
        pattern = re.sub(r"\{([^}]+)\}", lambda match: f"({match[1].replace(',', '|')})", name)
        patterns.append(re.compile(re.sub(r"<\w+>", r"[\\w.-]+", pattern)))
    return patterns


async def test_every_scalar_is_documented_and_every_documented_one_exists(world: Any) -> None:
    play, boom = world.rollout.play, trajectory_pb2.EpisodeFailure(reason=1, message="boom")
    world.rollout.play = lambda request, episode: (
        boom if (request.group_id, request.attempt) == ("g00000000", 0) else play(request, episode)
    )
    await world.run("validation.greedy_at_end=true", "run.checkpoint_every_steps=2")
    world.learner.models += [learner_pb2.SCORED_MODEL_REFERENCE, learner_pb2.SCORED_MODEL_CRITIC]
    clips = ["algorithm.reward_clip=1", "algorithm.advantage_clip=1", "validation.episodes=0"]
    for advantage in ("gae", "gigpo"):
        await world.run(f"algorithm.advantage={advantage}", "algorithm.kl.coefficient=0.1", *clips)
    patterns = documented_names()
    assert len(patterns) > 40
    logged = {name for _, metrics in world.notes.steps for name in metrics}
    logged |= {name for _, _, metrics in world.notes.validations for name in metrics}
    names = {name if "greedy/score" in name else name.replace("val_greedy/", "val/") for name in logged}
    assert sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)) == []
    assert [pattern.pattern for pattern in patterns if not any(pattern.fullmatch(name) for name in names)] == []


async def trained(world: Any, *overrides: str) -> list[list[tuple[str, tuple[float, ...]]]]:
    world.learner.__init__()
    await world.run(*overrides)
    return [[(sample.sample_id, tuple(sample.advantages)) for sample in samples] for _, samples in world.learner.steps]


async def test_what_is_trained_does_not_depend_on_timing(two_rollouts: Any) -> None:
    world = two_rollouts
    results = []
    for seed in range(3):
        delays = random.Random(seed)

        async def wait(request: Any, delays: random.Random = delays) -> None:
            await asyncio.sleep(delays.random() * 0.05)

        for rollout in world.rollouts:
            rollout.before_group = wait
        results.append(await trained(world, "batch.groups_per_step=4"))
    assert results[0] == results[1] == results[2]
    assert all(rollout.requests for rollout in world.rollouts), "both servers play"


async def test_another_seed_trains_something_else(world: Any) -> None:
    assert await trained(world) != await trained(world, "run.seed=43")


async def test_the_worst_and_the_best_episode_are_logged_as_text(world: Any) -> None:
    words = ["see", "the", "lake", "go", "Right"]
    Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="see")).save(
        str(world.directory / "tokenizer.json")
    )
    await world.run(f"model.path={world.directory}", "tracking.text_samples_every_steps=2", "validation.episodes=0")
    events = EventAccumulator(str(world.run_dir.event_dir))
    events.Reload()
    for name, score in (("episode/worst", 0), ("episode/best", 1)):
        texts = events.Tensors(name)
        assert [text.step for text in texts] == [0, 2]
        markdown = texts[0].tensor_proto.string_val[0].decode()
        assert f"score {score}" in markdown and "    the lake" in markdown and "    go Right" in markdown


async def test_groups_without_variance_are_left_out_and_a_batch_of_them_costs_no_training(world: Any) -> None:
    world.rollout.play = lambda request, episode: float(request.group_id in ("g00000002", "g00000003") and episode)
    summary = await world.run("algorithm.filter_zero_variance=true")
    assert [header.base_version.step for header, _ in world.learner.steps] == [0]
    assert world.rollout.updates == [0, 1], "no push without a new version"
    assert summary.steps == 3
    assert query(world, "SELECT step, version_before, version_after FROM steps ORDER BY step") == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 1),
    ]
    assert query(world, "SELECT step, SUM(trained) FROM step_trajectories GROUP BY step") == [(0, 0), (1, 4), (2, 0)]
    filtered = [metrics["scheduler/group_filter_count"] for _, metrics in world.notes.steps]
    assert filtered == [2, 0, 2]
    assert "actor/pg_loss" not in world.notes.steps[0][1]


async def test_two_environments_share_the_groups(world: Any) -> None:
    await world.run("environments=[{tag: FrozenLake, weight: 1}, {tag: Sokoban, weight: 1}]")
    tags = {request.group_id: request.environment_tag for request in world.rollout.requests}
    assert [tags[f"g{index:08d}"] for index in range(6)] == ["FrozenLake", "Sokoban"] * 3
    assert {"val/Sokoban/score/mean", "val/FrozenLake/score/mean"} <= set(world.notes.validations[0][2])


async def test_a_greedy_validation_at_the_end(world: Any) -> None:
    await world.run("validation.greedy_at_end=true")
    assert [(step, kind) for step, kind, _ in world.notes.validations][-1] == (3, "val_greedy")
    (request, *_) = [request for request in world.rollout.requests if request.group_id.startswith("val-greedy")]
    assert request.sampling.temperature == 0


async def test_no_validation(world: Any) -> None:
    await world.run("validation.episodes=0")
    assert world.notes.validations == []


async def test_stop_ends_the_run_after_the_step_in_progress(world: Any) -> None:
    async def stop() -> None:
        address = json.loads(world.run_dir.address_file.read_text())["address"]
        async with CoordinatorClient(address) as client:
            status = await client.get_status()
            assert (status.state, status.max_steps) == (coordinator_pb2.RUN_STATE_RUNNING, 100)
            kinds = [(service.kind, service.ready) for service in status.services]
            assert kinds == [
                (coordinator_pb2.SERVICE_KIND_ENVIRONMENT, True),
                (coordinator_pb2.SERVICE_KIND_ROLLOUT, True),
                (coordinator_pb2.SERVICE_KIND_LEARNER, True),
            ]
            assert status.services[1].version.lineage == "line"
            assert status.latest_metrics["critic/score/max"] == 1.0
            answer = await client.stop("enough")
            assert answer.state == coordinator_pb2.RUN_STATE_STOPPING
            assert (await client.stop("again")).state == coordinator_pb2.RUN_STATE_STOPPING

    tasks = []
    world.notes.at_step = lambda step: tasks.append(asyncio.create_task(stop())) if step == 1 else None
    summary = await world.run("run.max_steps=100")
    await tasks[0]
    assert summary.stop_cause == "enough"
    assert 2 <= summary.steps < 100
    assert query(world, "SELECT state FROM run") == [("stopped",)]
    assert summary.export_path == "/exports/final"


async def test_a_learner_that_is_used_again_goes_on_and_exports_under_another_name(world: Any) -> None:
    await world.run("run.max_steps=1")
    summary = await world.run("run.max_steps=1")
    assert world.learner.step == 2
    assert world.learner.exports[1].startswith("final-rollwire-")
    assert summary.export_path == f"/exports/{world.learner.exports[1]}"
    assert any("line@1" in notice for notice in world.notes.notices)


async def test_cancelling_leaves_a_ledger_that_says_so(world: Any) -> None:
    async def hang(request: Any) -> None:
        if request.group_id == "g00000002":
            await asyncio.sleep(60)

    world.rollout.before_group = hang
    task = asyncio.create_task(world.run())
    async with asyncio.timeout(60):
        while len(world.notes.steps) < 1:
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert query(world, "SELECT state FROM run") == [("cancelled",)]
    async with asyncio.timeout(30):  # less than it would go on for
        while world.rollout.in_flight:
            await asyncio.sleep(0.01)
