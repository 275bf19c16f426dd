"""Pushed trajectories: terms, checks at ingest, durability, groups, back-pressure, restarts."""

from __future__ import annotations

import asyncio
import math
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollwire.client.coordinator import CoordinatorClient
from rollwire.coordinator.errors import RunError
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import coordinator_pb2 as pb
from rollwire.v1 import trajectory_pb2, weights_pb2

PUSHED = ("environments=[{tag: Pushed, source: pushed, options: {level: 3}}]", "validation.episodes=0")
ACCEPTED, DUPLICATE = pb.SUBMISSION_STATUS_ACCEPTED, pb.SUBMISSION_STATUS_DUPLICATE
STALE, REJECTED = pb.SUBMISSION_STATUS_STALE, pb.SUBMISSION_STATUS_REJECTED
MALFORMED, GROUP = pb.SUBMISSION_REJECTION_MALFORMED, pb.SUBMISSION_REJECTION_GROUP


def query(world: Any, text: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(world.run_dir.path / "run.db") as connection:
        return connection.execute(text).fetchall()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def trajectory(group: str = "one", episode: int = 0, score: float = 1.0, step: int = 0) -> trajectory_pb2.Trajectory:
    item = trajectory_pb2.Trajectory(
        trajectory_id=f"{group}/{episode}",
        group_id=group,
        episode_index=episode,
        environment_tag="Pushed",
        environment_seed=7,
        score=score,
        metrics={"success": score},
        sampling=trajectory_pb2.SamplingSettings(
            temperature=1, top_p=1, max_tokens=9, logprob_mode=trajectory_pb2.LOGPROB_MODE_SAMPLED
        ),
        tokenizer_hash="a" * 64,
        template_hash="b" * 64,
    )
    sequence = item.sequences.add(token_ids=[1, 2, 3, 4], loss_mask=[False, False, True, True], logprobs=[0, 0, -1, -1])
    span = sequence.version_spans.add(version=weights_pb2.WeightVersion(lineage="line", step=step))
    span.range.begin, span.range.end = 2, 4
    turn = item.turns.add(reward=score, terminated=True)
    turn.prompt.end, turn.response.begin, turn.response.end = 2, 2, 4
    return item


class Pusher:
    """Calls the coordinator of a world's run."""

    def __init__(self, client: CoordinatorClient) -> None:
        self.client = client

    async def push(self, items: Iterable[trajectory_pb2.Trajectory]) -> list[pb.SubmitTrajectoriesResponse]:
        async def requests() -> AsyncIterator[pb.SubmitTrajectoriesRequest]:
            for item in items:
                yield pb.SubmitTrajectoriesRequest(trajectory=item)

        return [answer async for answer in self.client.submit_trajectories(requests(), timeout_s=30)]

    async def push_one(self, item: trajectory_pb2.Trajectory) -> pb.SubmitTrajectoriesResponse:
        (answer,) = await self.push([item])
        return answer

    async def terms(self) -> pb.GetSubmissionTermsResponse:
        async with asyncio.timeout(30):
            while True:
                try:
                    return await self.client.get_submission_terms("Pushed")
                except RollwireError as error:
                    if error.reason != Reason.NO_WEIGHTS:
                        raise
                await asyncio.sleep(0.01)

    async def wait_wanted(self, groups: int, step: int) -> None:
        async with asyncio.timeout(30):
            while True:
                terms = await self.terms()
                if terms.groups_wanted >= groups and terms.version.step >= step:
                    return
                await asyncio.sleep(0.01)

    async def push_on(self, lag: int = 0) -> int:
        """Pushes what is wanted until the run has ended; returns how many trajectories were accepted."""
        accepted = number = 0
        while True:
            try:
                terms = await self.terms()
                if not terms.groups_wanted:
                    await asyncio.sleep(0.01)
                    continue
                number += 1
                step = max(0, terms.version.step - lag)
                pair = [trajectory(f"auto-{number}", episode, float(episode), step) for episode in (0, 1)]
                accepted += sum(answer.status == ACCEPTED for answer in await self.push(pair))
            except RollwireError as error:
                assert error.reason in (Reason.RUN_ENDED, Reason.DRAINING), error
                return accepted


@asynccontextmanager
async def running(world: Any, *overrides: str, resume: bool = False) -> AsyncIterator[tuple[asyncio.Task[Any], Pusher]]:
    """A run and its pusher; the run is ended with the context."""
    world.notes.notices.clear()
    start = world.resume if resume else world.run
    run = asyncio.create_task(start(*PUSHED, *overrides))
    try:
        await until(lambda: run.done() or any("listens on" in text for text in world.notes.notices))
        (notice,) = [text for text in world.notes.notices if "listens on" in text]
        async with CoordinatorClient(notice.split()[4]) as client:
            yield run, Pusher(client)
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


def assert_counts_add_up(world: Any) -> None:
    latest = world.status.latest
    assert latest["scheduler/requested"] == latest["scheduler/completed"] + latest["scheduler/failed"]
    assert latest["scheduler/completed"] == query(world, "SELECT COUNT(*) FROM trajectories")[0][0]


async def test_a_run_is_trained_by_a_pusher_alone(world: Any) -> None:
    async with running(world) as (run, pusher):
        terms = await pusher.terms()
        accepted = await pusher.push_on()
        summary = await run
    assert (terms.episodes_per_group, terms.max_sequence_tokens, terms.max_staleness) == (2, 2048, 0)
    assert (terms.tokenizer_hash, terms.template_hash) == ("a" * 64, "b" * 64)
    assert (terms.sampling.temperature, terms.sampling.top_p, terms.sampling.max_tokens) == (1, 1, 128)
    assert list(terms.rollout_targets) == [world.hosts[world.rollout].address]
    assert dict(terms.options) == {"level": 3}
    assert (summary.steps, summary.totals.samples, accepted) == (3, 12, 12)
    assert world.rollout.requests == []
    ids = [sample.sample_id for _, samples in world.learner.steps for sample in samples]
    assert ids[:2] == ["pushed/auto-1/0", "pushed/auto-1/1"] and len(set(ids)) == 12
    assert_counts_add_up(world)
    assert world.status.latest["pushed/accepted"] == 12
    assert query(world, "SELECT state, COUNT(*) FROM arrivals GROUP BY state") == [("taken", 12)]


async def test_each_id_is_accepted_once_and_trained_once(world: Any) -> None:
    """I1, also where the same ids come over two streams at the same time."""
    async with running(world, "run.max_steps=1", "batch.groups_per_step=1") as (run, pusher):
        await pusher.wait_wanted(1, 0)
        first = trajectory()
        answers = await asyncio.gather(*(pusher.push([first, first]) for _ in range(3)))
        statuses = [answer.status for stream in answers for answer in stream]
        assert sorted(statuses) == [ACCEPTED] + [DUPLICATE] * 5
        assert (await pusher.push_one(trajectory(episode=1))).status == ACCEPTED
        await run
    assert query(world, "SELECT trajectory_id FROM step_trajectories ORDER BY 1") == [
        ("pushed/one/0",),
        ("pushed/one/1",),
    ]


def changed(change: Callable[[trajectory_pb2.Trajectory], Any]) -> trajectory_pb2.Trajectory:
    item = trajectory("bad")
    change(item)
    return item


def set_reward(value: float) -> Callable[[trajectory_pb2.Trajectory], None]:
    def change(item: trajectory_pb2.Trajectory) -> None:
        item.turns[0].reward = value
        item.score = value

    return change


def of(path: str, value: Any) -> Callable[[trajectory_pb2.Trajectory], None]:
    """Sets a field by its path, such as `turns.0.index`."""

    def change(item: Any) -> None:
        *parts, name = path.split(".")
        for part in parts:
            item = item[int(part)] if part.isdigit() else getattr(item, part)
        if name.isdigit():
            item[int(name)] = value
        else:
            setattr(item, name, value)

    return change


def grow(item: trajectory_pb2.Trajectory, tokens: int) -> None:
    extra = tokens - 4
    sequence = item.sequences[0]
    sequence.token_ids.extend([1] * extra)
    sequence.loss_mask.extend([False] * extra)
    sequence.logprobs.extend([0.0] * extra)


LAST = "sequences.0"
BAD: dict[str, tuple[Callable[[trajectory_pb2.Trajectory], Any], int, str]] = {
    "no id": (of("trajectory_id", ""), MALFORMED, "trajectory_id is ''"),
    "long id": (of("trajectory_id", "x" * 129), MALFORMED, "trajectory_id is"),
    "control characters": (of("trajectory_id", "a\x07"), MALFORMED, "trajectory_id is"),
    "no group": (of("group_id", ""), MALFORMED, "group_id is ''"),
    "path as group": (of("group_id", "../x"), MALFORMED, "group_id is"),
    "seed": (of("environment_seed", 1 << 63), MALFORMED, "environment_seed is"),
    "tag": (of("environment_tag", "Lake"), pb.SUBMISSION_REJECTION_UNKNOWN_TAG, "takes trajectories pushed as Pushed"),
    "4 MiB": (of("tokenizer_hash", "x" * (4 << 20)), MALFORMED, "bytes; allowed: at most 4194304"),
    "tokenizer": (of("tokenizer_hash", "c" * 64), pb.SUBMISSION_REJECTION_TOKENIZER, "the run has 'aaa"),
    "template": (of("template_hash", ""), pb.SUBMISSION_REJECTION_TEMPLATE, "the run has 'bbb"),
    "temperature": (of("sampling.temperature", 0.5), pb.SUBMISSION_REJECTION_SAMPLING, "temperature is 0.5"),
    "nan temperature": (of("sampling.temperature", math.nan), pb.SUBMISSION_REJECTION_SAMPLING, "temperature is nan"),
    "top_p": (of("sampling.top_p", 0.9), pb.SUBMISSION_REJECTION_SAMPLING, "top_p is 0.89"),
    "top_k": (of("sampling.top_k", 5), pb.SUBMISSION_REJECTION_SAMPLING, "top_k is 5"),
    "mode": (of("sampling.logprob_mode", 0), pb.SUBMISSION_REJECTION_SAMPLING, "logprob_mode is LOGPROB_MODE_UNSPEC"),
    "unknown mode": (of("sampling.logprob_mode", 77), pb.SUBMISSION_REJECTION_SAMPLING, "logprob_mode is 77"),
    "nan reward": (set_reward(math.nan), MALFORMED, "it must be finite"),
    "infinite reward": (set_reward(math.inf), MALFORMED, "it must be finite"),
    "huge reward": (set_reward(1e300), MALFORMED, "turns[0].reward is '1e+300'; allowed: a number within ±1e+09"),
    "another score": (of("score", 2.0), MALFORMED, "the sum of the turns' rewards, 1"),
    "short logprobs": (lambda item: item.sequences[0].logprobs.pop(), MALFORMED, "have lengths 4, 4 and 3"),
    "short mask": (lambda item: item.sequences[0].loss_mask.pop(), MALFORMED, "have lengths 4, 3 and 4"),
    "nan logprob": (of(f"{LAST}.logprobs.2", math.nan), MALFORMED, "log-probability of a sampled token is not finite"),
    "positive logprob": (
        of(f"{LAST}.logprobs.3", 0.5),
        MALFORMED,
        "sequences[0].logprobs[3] is '0.5'; allowed: at most 0",
    ),
    "token too large": (
        of(f"{LAST}.token_ids.1", 100),
        MALFORMED,
        "sequences[0].token_ids[1] is '100'; allowed: 0 to 99",
    ),
    "negative token": (of(f"{LAST}.token_ids.1", -1), MALFORMED, "token_ids[1] is '-1'"),
    "no sequences": (lambda item: item.ClearField("sequences"), MALFORMED, "0 sequences and 1 turns"),
    "no turns": (lambda item: item.ClearField("turns"), MALFORMED, "1 sequences and 0 turns"),
    "no versions": (lambda item: item.sequences[0].ClearField("version_spans"), MALFORMED, "cover 0 tokens"),
    "no lineage": (of(f"{LAST}.version_spans.0.version.lineage", ""), MALFORMED, "names no version"),
    "future version": (
        of(f"{LAST}.version_spans.0.version.step", 9),
        MALFORMED,
        "drawn by line@9; the newest is line@0",
    ),
    "span outside": (of(f"{LAST}.version_spans.0.range.end", 5), MALFORMED, "outside the 4 tokens"),
    "turn number": (of("turns.0.index", 3), MALFORMED, "turns[0].index is '3'"),
    "turn of no sequence": (of("turns.0.sequence", 4), MALFORMED, "there is no sequence 4"),
    "prompt after response": (of("turns.0.prompt.end", 3), MALFORMED, "turns[0] is 'ranges out of order'"),
    "huge prompt": (of("turns.0.prompt.begin", 1 << 31), MALFORMED, "ranges out of order"),
    "digest": (of("turns.0.observation_digest", b"x"), MALFORMED, "observation_digest is '1 bytes'"),
    "nan metric": (lambda item: item.metrics.update({"m": math.nan}), MALFORMED, "metrics['m'] is 'nan'"),
    "metric name": (lambda item: item.metrics.update({"a b": 1.0}), MALFORMED, "metrics is 'a b'"),
    "many metrics": (lambda item: item.metrics.update({f"m{n}": 1.0 for n in range(300)}), MALFORMED, "at most 256"),
    "turn metric": (lambda item: item.turns[0].metrics.update({"m": math.inf}), MALFORMED, "turns[0].metrics['m']"),
    "too long": (lambda item: grow(item, 2049), pb.SUBMISSION_REJECTION_TOO_LONG, "has 2049 tokens; allowed: 2048"),
    "episode": (of("episode_index", 2), GROUP, "episode_index is 2; a group has 2 episodes"),
}


async def test_bad_input_costs_its_sender_an_answer_and_nobody_anything_else(world: Any) -> None:
    async with running(world, "run.max_steps=1", "batch.groups_per_step=1") as (run, pusher):
        await pusher.wait_wanted(1, 0)
        answers = await pusher.push(changed(change) for change, _, _ in BAD.values())
        for (name, (_, rejection, message)), answer in zip(BAD.items(), answers, strict=True):
            assert (answer.status, answer.rejection) == (REJECTED, rejection), f"{name}: {answer}"
            assert message in answer.message and len(answer.message) < 500, f"{name}: {answer.message}"
        assert query(world, "SELECT COUNT(*) FROM arrivals") == [(0,)]
        await pusher.push([trajectory(episode=0), trajectory(episode=1)])
        await run


async def test_a_message_beyond_the_limit_of_the_port_breaks_the_stream_alone(world: Any) -> None:
    async with running(world) as (_, pusher):
        await pusher.wait_wanted(1, 0)
        with pytest.raises(RollwireError):
            await pusher.push_one(changed(of("tokenizer_hash", "x" * (10 << 20))))
        assert (await pusher.push_one(trajectory())).status == ACCEPTED


async def test_members_of_a_group_must_fit(world: Any) -> None:
    async with running(world) as (_, pusher):
        await pusher.wait_wanted(1, 0)
        assert (await pusher.push_one(trajectory("g"))).status == ACCEPTED
        taken = trajectory("g")
        taken.trajectory_id = "another"
        other_seed = trajectory("g", 1)
        other_seed.environment_seed = 8
        answers = await pusher.push([taken, other_seed])
        assert [(answer.status, answer.rejection) for answer in answers] == [(REJECTED, GROUP)] * 2
        assert "came before, as another trajectory" in answers[0].message
        assert "has the environment_seed 7, this is 8" in answers[1].message
        assert (await pusher.push_one(trajectory("g", 1))).status == ACCEPTED
        late = trajectory("g", 1)
        late.trajectory_id = "late"
        answer = await pusher.push_one(late)
        assert (answer.status, answer.rejection) == (REJECTED, GROUP)


async def test_a_group_id_of_the_runs_own_form_harms_nothing(world: Any) -> None:
    async with running(world, "run.max_steps=1", "batch.groups_per_step=2") as (run, pusher):
        await pusher.wait_wanted(2, 0)
        await pusher.push(trajectory(group, episode) for group in ("g00000001", "g00000000") for episode in (0, 1))
        await run
    assert query(world, "SELECT group_id, environment_seed FROM groups ORDER BY 1") == [
        ("g00000000", 7),
        ("g00000001", 7),
    ]


async def test_what_is_too_old_is_stale_and_so_is_its_group(world: Any) -> None:
    """I5."""
    async with running(world, "batch.groups_per_step=1") as (_, pusher):
        await pusher.wait_wanted(1, 0)
        await pusher.push([trajectory("half", 0), trajectory("a", 0), trajectory("a", 1)])
        await pusher.wait_wanted(1, 1)
        answers = await pusher.push([trajectory("half", 1), trajectory("late", 0), trajectory("late", 1, step=1)])
        assert [answer.status for answer in answers] == [STALE] * 3
        assert "drawn by version 0; the newest is line@1 and max_staleness is 0" in answers[1].message
        other = trajectory("foreign", 0, step=1)
        other.sequences[0].version_spans[0].version.lineage = "elsewhere"
        assert (await pusher.push_one(other)).status == STALE
        assert (await pusher.push_one(trajectory("half", 0))).status == DUPLICATE
    assert query(world, "SELECT group_id, state FROM arrivals WHERE state <> 'taken'") == [("half", "stale")]


@pytest.mark.parametrize("lag", [1, 2])
async def test_with_staleness_older_tokens_are_trained_within_the_bound(world: Any, lag: int) -> None:
    async with running(world, "max_staleness=2", "run.max_steps=6") as (run, pusher):
        await pusher.push_on(lag)
        summary = await run
    assert summary.totals.samples == 24
    lags = [metrics["staleness/max"] for _, metrics in world.notes.steps]
    assert 0 < max(lags) <= 2, lags
    assert_counts_add_up(world)


async def test_a_group_that_stays_incomplete_is_dropped(world: Any) -> None:
    # One group waits at a time: the run gives up after five of them.
    async with running(world, "timeouts.group_s=1", "batch.groups_per_step=1") as (_, pusher):
        await pusher.wait_wanted(1, 0)
        await pusher.push_one(trajectory("half"))
        await asyncio.sleep(1.0)
        answer = await pusher.push_one(trajectory("half", 1))
        assert (answer.status, answer.rejection) == (REJECTED, GROUP)
        assert "incomplete for more than timeouts.group_s=1 s" in answer.message
        assert query(world, "SELECT state FROM arrivals") == [("incomplete",)]


async def test_people_are_told_that_nobody_pushes(world: Any) -> None:
    def told() -> list[str]:
        return [text for text in world.notes.notices if "was pushed" in text]

    async with running(world, "timeouts.group_s=4"):
        await until(lambda: len(told()) > 0)
    assert told()[0].startswith("nothing was pushed as Pushed yet: waiting up to timeouts.group_s=4 s, ")


async def test_a_run_that_nobody_pushes_to_ends_with_a_reason(world: Any) -> None:
    with pytest.raises(RunError) as raised:
        await world.run(*PUSHED, "timeouts.group_s=0.05", "batch.groups_per_step=1")
    assert "no complete group was pushed as Pushed during timeouts.group_s=0.05 s; start a pusher" in str(raised.value)


async def test_a_run_for_pushers_ends_when_no_rollout_server_is_left(world: Any) -> None:
    """Nobody could draw tokens any more, so that waiting for pushers would be in vain."""
    stopped: list[asyncio.Task[None]] = []

    def stop(step: int) -> None:
        stopped.append(asyncio.create_task(world.hosts[world.rollout].stop()))

    world.notes.at_step = stop
    async with running(world, "batch.groups_per_step=1", "timeouts.group_s=600", "run.max_steps=9") as (run, pusher):
        await pusher.wait_wanted(1, 0)
        await pusher.push([trajectory("a", 0), trajectory("a", 1)])
        await pusher.wait_wanted(1, 1)
        await asyncio.gather(*stopped)
        await pusher.push([trajectory("b", 0, step=1), trajectory("b", 1, step=1)])
        with pytest.raises(RunError, match=r"all rollout servers were lost for more than 1\.5 s"):
            await run


async def test_the_server_reads_on_only_while_it_has_room(world: Any) -> None:
    release = asyncio.Event()

    async def hold() -> None:
        if world.rollout.updates:
            await release.wait()

    world.rollout.before_update = hold
    async with running(world, "batch.groups_per_step=1", "max_staleness=1") as (run, pusher):
        await pusher.wait_wanted(2, 0)
        answered: list[int] = []
        sent: list[int] = []

        async def requests() -> AsyncIterator[pb.SubmitTrajectoriesRequest]:
            for number in range(400):
                sent.append(number)
                item = trajectory(f"many-{number // 2}", number % 2)
                item.metrics.update({"x" * 100 + str(n): 1.0 for n in range(200)})
                yield pb.SubmitTrajectoriesRequest(trajectory=item)

        async def push() -> None:
            async for answer in pusher.client.submit_trajectories(requests(), timeout_s=60):
                answered.append(answer.status)

        pushing = asyncio.create_task(push())
        # Two steps' groups are taken, one trained and one waiting; four wait behind them: 12 trajectories.
        await until(lambda: len(answered) >= 12)
        for _ in range(20):
            await pusher.terms()
        assert len(answered) == 12 and len(sent) < 400, "a pusher that is not read must stop sending"
        release.set()
        await until(lambda: len(answered) > 12 or run.done())
        assert not run.done()
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)


async def test_incomplete_and_waiting_groups_survive_the_coordinator(world: Any) -> None:
    """I1 and I2 across a restart."""
    small = ("batch.groups_per_step=2", "run.max_steps=1")
    async with running(world, *small) as (run, pusher):
        await pusher.wait_wanted(2, 0)
        await pusher.push([trajectory("half", 0), trajectory("whole", 0), trajectory("whole", 1)])
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
    async with running(world, *small, resume=True) as (run, pusher):
        await pusher.terms()
        again = await pusher.push([trajectory("half", 0), trajectory("whole", 1), trajectory("half", 1)])
        assert [answer.status for answer in again] == [DUPLICATE, DUPLICATE, ACCEPTED]
        await run
    trained = query(world, "SELECT trajectory_id FROM step_trajectories ORDER BY 1")
    assert trained == [("pushed/half/0",), ("pushed/half/1",), ("pushed/whole/0",), ("pushed/whole/1",)]
    assert_counts_add_up(world)


async def test_what_was_pushed_for_other_weights_is_given_up_when_a_run_is_resumed(world: Any) -> None:
    async with running(world, "run.max_steps=1") as (run, pusher):
        await pusher.wait_wanted(2, 0)
        await pusher.push([trajectory("half", 0)])
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
    world.learner.restart()
    world.learner.lineage = "other"
    world.learner.damaged.update(world.learner.checkpoints)
    async with running(world, "run.max_steps=1", resume=True) as (_, pusher):
        assert (await pusher.terms()).version.lineage == "other"
        answers = await pusher.push([trajectory("half", 0), trajectory("half", 1)])
        assert [answer.status for answer in answers] == [DUPLICATE, STALE]
    assert query(world, "SELECT state FROM arrivals") == [("stale",)]


async def test_unknown_tags_and_the_ends_of_a_run(world: Any) -> None:
    async with running(world, "run.max_steps=1") as (run, pusher):
        await pusher.terms()
        with pytest.raises(RollwireError) as raised:
            await pusher.client.get_submission_terms("Agent")
        assert raised.value.reason == Reason.UNKNOWN_ENVIRONMENT and "it has Pushed" in raised.value.message
        idle = asyncio.Event()

        async def never() -> AsyncIterator[pb.SubmitTrajectoriesRequest]:
            await idle.wait()
            yield pb.SubmitTrajectoriesRequest()

        async def listen() -> list[Any]:
            return [answer async for answer in pusher.client.submit_trajectories(never(), timeout_s=60)]

        listening = asyncio.create_task(listen())
        await pusher.push_on()
        with pytest.raises(RollwireError) as raised:
            await listening
        assert raised.value.reason == Reason.RUN_ENDED
        with pytest.raises(RollwireError) as raised:
            await pusher.client.get_submission_terms("Pushed")
        assert raised.value.reason == Reason.RUN_ENDED
        await run


async def test_one_run_mixes_all_sources(world: Any) -> None:
    mix = "environments=[{tag: FrozenLake},{tag: Pushed, source: pushed},{tag: Sokoban, weight: 0}]"
    async with running(world, mix, "validation.episodes=2", "validation.every_steps=0") as (run, pusher):
        await pusher.push_on()
        await run
    assert query(world, "SELECT environment_tag, COUNT(*) FROM groups GROUP BY 1 ORDER BY 1") == [
        ("FrozenLake", 3),
        ("Pushed", 3),
    ]
    tags = {request.environment_tag for request in world.rollout.requests if request.group_id.startswith("val")}
    assert tags == {"FrozenLake", "Sokoban"}
    assert {"env/Pushed/success", "env/FrozenLake/success"} <= set(world.status.latest)
    assert_counts_add_up(world)
