"""Agents that keep their own loop: sessions, groups, results, and everything that may go wrong with them."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from rollwire.client.coordinator import CoordinatorClient
from rollwire.coordinator.errors import RunError
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import coordinator_pb2, weights_pb2

AGENTS = ("environments=[{tag: Agent, source: agent, options: {level: 3}}]", "validation.episodes=0")
Request = coordinator_pb2.OpenAgentSessionRequest
Close = coordinator_pb2.CloseAgentSessionRequest
Result = coordinator_pb2.AgentResult


def query(world: Any, text: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(world.run_dir.path / "run.db") as connection:
        return connection.execute(text).fetchall()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


class Agents:
    """Calls the coordinator of a world's run."""

    def __init__(self, world: Any, client: CoordinatorClient) -> None:
        self.world = world
        self.client = client
        self.count = 0

    async def open(self, task: str = "", **fields: Any) -> coordinator_pb2.OpenAgentSessionResponse:
        """Opens a session, as soon as there is one to be had."""
        self.count += 1
        request = Request(request_id=f"r{self.count}", environment_tag="Agent", task_name=task, **fields)
        async with asyncio.timeout(30):
            while True:
                try:
                    return await self.client.open_agent_session(request)
                except RollwireError as error:
                    if error.code not in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
                        raise
                await asyncio.sleep(0.01)

    def call(self, session: coordinator_pb2.OpenAgentSessionResponse) -> str:
        (rollout,) = [item for item in self.world.rollouts if session.session_id in item.sessions]
        return rollout.call(session.session_id)

    async def close(
        self, session: coordinator_pb2.OpenAgentSessionResponse, reward: float = 1.0, **fields: Any
    ) -> coordinator_pb2.CloseAgentSessionResponse:
        result = Result(reward=reward, **fields)
        return await self.client.close_agent_session(Close(session_id=session.session_id, completed=result))

    async def play(self, reward: float = 1.0, task: str = "") -> coordinator_pb2.OpenAgentSessionResponse:
        session = await self.open(task)
        self.call(session)
        await self.close(session, reward)
        return session

    async def play_on(self) -> list[coordinator_pb2.OpenAgentSessionResponse]:
        """Plays until the run has ended."""
        played = []
        while True:
            try:
                played.append(await self.play(float(len(played) % 2)))
            except RollwireError as error:
                assert error.reason in (Reason.RUN_ENDED, Reason.UNKNOWN_SESSION, Reason.DRAINING), error
                return played


@asynccontextmanager
async def running(world: Any, *overrides: str) -> AsyncIterator[tuple[asyncio.Task[Any], Agents]]:
    """A run and its agents; the run is ended with the context."""
    run = asyncio.create_task(world.run(*AGENTS, *overrides))
    async with following(world, run) as agents:
        yield run, agents


@asynccontextmanager
async def following(world: Any, run: asyncio.Task[Any]) -> AsyncIterator[Agents]:
    try:
        address: list[str] = []

        def known() -> bool:
            found = [text for text in world.notes.notices if "listens on" in text]
            address[:] = found[-1].split()[4:5] if found else []
            return bool(address) or run.done()

        await until(known)
        async with CoordinatorClient(address[0]) as client:
            yield Agents(world, client)
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


def assert_counts_add_up(world: Any) -> None:
    completed = query(world, "SELECT COUNT(*) FROM trajectories")[0][0]
    failed = query(world, "SELECT COUNT(*) FROM failures")[0][0]
    latest = world.status.latest
    assert latest["scheduler/requested"] == latest["scheduler/completed"] + latest["scheduler/failed"]
    assert (latest["scheduler/completed"], latest["scheduler/failed"]) == (completed, failed)


async def test_a_run_is_trained_by_agents_alone(world: Any) -> None:
    async with running(world) as (run, agents):
        played = await agents.play_on()
        summary = await run
    assert (summary.steps, summary.totals.samples, len(played)) == (3, 12, 12)
    assert world.rollout.requests == [], "nothing is played by the rollout server"
    first = played[0]
    assert (first.base_url, first.model, first.task_name) == ("http://127.0.0.1:1/v1", "tiny", "g00000000")
    assert dict(first.options) == {"level": 3} and (first.max_tokens, first.max_sequence_tokens) == (128, 2048)
    by_group = Counter(session.group_id for session in played)
    assert by_group == {f"g{index:08d}": 2 for index in range(6)}
    assert len({(session.group_id, session.seed) for session in played}) == 6, "a group shares its seed"
    asked = world.rollout.opened[0]
    assert asked.key_digest == hashlib.sha256(first.api_key.encode()).digest()
    assert (asked.environment_tag, asked.environment_seed, asked.sampling.max_tokens) == ("Agent", first.seed, 128)
    assert asked.required_version == weights_pb2.WeightVersion(lineage="line", step=0)
    assert len({request.sampling_seed for request in world.rollout.opened}) == 12
    assert_counts_add_up(world)
    assert query(world, "SELECT state, COUNT(*) FROM arrivals GROUP BY state") == [("taken", 12)]
    assert world.rollout.in_flight == 0 and world.status.latest["agents/sessions"] == 12


async def test_opening_and_closing_are_idempotent(world: Any) -> None:
    async with running(world) as (_, agents):
        first = await agents.open()
        agents.count -= 1
        again = await agents.open()
        assert again == first and len(world.rollout.opened) == 1
        agents.call(first)
        answers = await asyncio.gather(*(agents.close(first, reward) for reward in (1.0, 2.0, 1.0)))
        assert answers[0] == answers[1] == answers[2] == await agents.close(first, 3.0)
        assert (answers[0].calls, answers[0].sequences) == (1, 1) and answers[0].trajectory_id
        agents.count -= 1
        assert (await agents.open()).session_id != first.session_id, "a closed session's key may be used again"
        assert query(world, "SELECT COUNT(*) FROM arrivals") == [(1,)]


async def test_sessions_with_one_name_form_groups(world: Any) -> None:
    async with running(world) as (_, agents):
        red, blue, red_again = await agents.open("red"), await agents.open("blue"), await agents.open("red")
        assert red.group_id == red_again.group_id != blue.group_id
        assert (red.task_name, blue.task_name, red.seed) == ("red", "blue", red_again.seed)
        for name in ("red", "", "green"):  # both groups of the step are taken by names; one place of blue is left
            with pytest.raises(RollwireError) as raised:
                await agents.client.open_agent_session(Request(request_id="x", environment_tag="Agent", task_name=name))
            assert raised.value.reason == Reason.EPISODES_EXHAUSTED and (raised.value.retry_after_s or 0) > 0
        assert (await agents.open("blue")).episode_index == 1


async def test_a_failed_session_is_offered_again_and_never_rewarded(world: Any) -> None:
    async with running(world, "run.max_steps=1") as (run, agents):
        first = await agents.open()
        agents.call(first)
        await agents.client.close_agent_session(Close(session_id=first.session_id, failure="the tool broke"))
        silent = await agents.open()
        for _ in range(2):
            with pytest.raises(RollwireError) as raised:
                await agents.close(silent, 5.0)
            assert raised.value.reason == Reason.NO_CALLS
        await agents.play_on()
        await run
    rows = query(world, "SELECT group_id, episode_index, attempt, reason, message FROM failures ORDER BY attempt")
    assert rows == [
        ("g00000000", 0, 0, "agent_failed", "the tool broke"),
        ("g00000000", 0, 1, "agent_failed", "it was closed with a reward, but no call completed"),
    ]
    assert query(world, "SELECT attempt FROM trajectories WHERE group_id = 'g00000000' ORDER BY episode_index") == [
        (2,),
        (0,),
    ]
    assert first.session_id in world.rollout.discarded
    assert_counts_add_up(world)


async def test_a_group_whose_episode_fails_too_often_is_replaced(world: Any) -> None:
    async with running(world, "run.max_steps=1") as (run, agents):
        other = await agents.open()  # of the same group, still open when that is given up
        for _ in range(3):
            session = await agents.open(other.task_name)
            await agents.client.close_agent_session(Close(session_id=session.session_id, failure="no"))
        await until(lambda: other.session_id in world.rollout.discarded)
        with pytest.raises(RollwireError) as raised:
            await agents.close(other)
        assert raised.value.reason == Reason.UNKNOWN_SESSION and "given up" in raised.value.message
        await agents.play_on()
        await run
    assert query(world, "SELECT state FROM groups WHERE group_id = 'g00000000'") == [("failed",)]
    reasons = query(world, "SELECT reason, COUNT(*) FROM failures GROUP BY reason ORDER BY reason")
    assert reasons == [("agent_failed", 3), ("cancelled", 1)]
    assert_counts_add_up(world)


async def test_an_agent_that_vanishes_is_found_by_its_lease(world: Any) -> None:
    async with running(world, "run.max_steps=1") as (run, agents):
        lease = {"lease": {"seconds": 1}}
        lost = await agents.open(**lease)
        await asyncio.sleep(1.0)
        world.rollout.forget(lost.session_id)
        await until(lambda: world.status.episodes_done == 1)
        with pytest.raises(RollwireError) as raised:
            await agents.close(lost)
        assert raised.value.reason == Reason.UNKNOWN_SESSION and "lease of 1 s has ended" in raised.value.message
        await agents.play_on()
        await run
    assert query(world, "SELECT reason FROM failures") == [("agent_lost",)]
    assert_counts_add_up(world)


async def test_an_agent_that_vanishes_holds_its_group_up_for_no_longer_than_group_s(world: Any) -> None:
    async with running(world, "run.max_steps=1", "timeouts.group_s=7.5") as (_, agents):
        await agents.open()
        await agents.open(lease={"seconds": 3})
        leases_s = [request.lease.ToNanoseconds() / 1e9 for request in world.rollout.opened]
        assert leases_s == [7.5, 3.0], "the lease of 10 minutes is cut to timeouts.group_s"


async def test_people_are_told_about_sessions_without_calls(world: Any) -> None:
    async with running(world, "run.max_steps=1") as (_, agents):
        quiet = await agents.open()
        world.rollout.idle_s[quiet.session_id] = 31.0
        await until(lambda: any("made no call" in text for text in world.notes.notices))
    (text,) = [text for text in world.notes.notices if "made no call" in text]
    assert text.startswith(
        "1 session of Agent has made no call for 31 s; unless one comes, the first is given up in 0 s"
    ), text


async def test_a_session_lasts_no_longer_than_an_episode_may(world: Any) -> None:
    async with running(world, "run.max_steps=1", "rollout.episode_timeout_s=0.2") as (_, agents):
        slow = await agents.open()
        await until(lambda: slow.session_id in world.rollout.discarded)
        with pytest.raises(RollwireError) as raised:
            await agents.close(slow)
        assert "rollout.episode_timeout_s=0.2" in raised.value.message


async def test_a_group_that_nobody_plays_ends_the_run_with_a_reason(world: Any) -> None:
    with pytest.raises(RunError) as raised:
        await world.run(*AGENTS, "timeouts.group_s=0.05", "batch.groups_per_step=1")
    assert "no agent asked for 2 of its 2 episodes during timeouts.group_s=0.05 s; start agents" in str(raised.value)


async def test_groups_wait_their_turn_while_one_agent_plays_others(world: Any) -> None:
    overrides = ("run.max_steps=1", "batch.groups_per_step=4", "timeouts.group_s=3")
    async with running(world, *overrides) as (run, agents):
        for _ in range(8):
            session = await agents.open()
            await asyncio.sleep(0.5)  # the last group begins later than a lonely one would be given up
            agents.call(session)
            await agents.close(session)
        await run
    assert query(world, "SELECT COUNT(*) FROM failures") == [(0,)]
    assert query(world, "SELECT COUNT(*) FROM groups WHERE state = 'failed'") == [(0,)]


async def test_people_are_told_that_nobody_asks(world: Any) -> None:
    def told() -> list[str]:
        return [text for text in world.notes.notices if "has asked" in text]

    async with running(world, "timeouts.group_s=4") as (_, agents):
        await until(lambda: len(told()) == 2)
        address = agents.client.target
    for text in told()[:2]:
        assert text.startswith("no agent has asked for Agent yet: waiting up to timeouts.group_s=4 s, "), text
        assert text.endswith(f"agents ask at {address}")


async def test_a_lost_rollout_server_costs_its_sessions(two_rollouts: Any) -> None:
    world = two_rollouts
    async with running(world, "run.max_steps=1") as (run, agents):
        sessions = [await agents.open() for _ in range(4)]
        assert [len(rollout.sessions) for rollout in world.rollouts] == [2, 2], "the least busy server is taken"
        await world.hosts[world.rollouts[1]].stop()
        for session in sessions:
            if session.session_id in world.rollouts[0].sessions:
                agents.call(session)
                await agents.close(session)
        await agents.play_on()
        await run
    assert query(world, "SELECT reason, COUNT(*) FROM failures GROUP BY reason") == [("rollout_lost", 2)]
    assert_counts_add_up(world)


async def test_a_record_that_contradicts_itself_ends_the_run(world: Any) -> None:
    world.rollout.spoil = lambda trajectory: trajectory.sequences[0].logprobs.pop()
    async with running(world) as (run, agents):
        session = await agents.open()
        agents.call(session)
        with pytest.raises(RollwireError) as raised:
            await agents.close(session)
        assert raised.value.reason == Reason.RUN_ENDED
        with pytest.raises(RunError, match=r"broke the contract: .* have lengths 4, 4 and 3"):
            await run


async def test_a_server_without_an_edge_ends_the_run_with_its_own_words(world: Any) -> None:
    def refuse() -> None:
        raise RollwireError(grpc.StatusCode.FAILED_PRECONDITION, Reason.AGENTS_DISABLED, "no HTTP edge here")

    world.rollout.open_fault = refuse
    async with running(world) as (run, agents):
        with pytest.raises(RollwireError) as raised:
            await agents.open()
        assert raised.value.reason == Reason.RUN_ENDED
        with pytest.raises(RunError, match=r"refused an agent's session: .*no HTTP edge here"):
            await run


async def test_a_server_without_an_edge_is_found_before_the_run_begins(two_rollouts: Any) -> None:
    def refuse() -> None:
        raise RollwireError(grpc.StatusCode.FAILED_PRECONDITION, Reason.AGENTS_DISABLED, "no HTTP edge here")

    two_rollouts.rollouts[1].close_fault = refuse
    target = two_rollouts.hosts[two_rollouts.rollouts[1]].address
    with pytest.raises(RunError, match=f"'Agent' has source agent, but .* rollout server at {target}: no HTTP edge"):
        await two_rollouts.run(*AGENTS)
    assert not two_rollouts.status.began and two_rollouts.learner.calls == 0


async def test_a_full_server_makes_agents_wait(world: Any) -> None:
    world.rollout.capacity = 2
    async with running(world, "run.max_steps=1") as (run, agents):
        held = [await agents.open(), await agents.open()]
        with pytest.raises(RollwireError) as raised:
            await agents.client.open_agent_session(Request(request_id="more", environment_tag="Agent"))
        assert raised.value.reason == Reason.EPISODES_EXHAUSTED
        for session in held:
            agents.call(session)
            await agents.close(session)
        await agents.play_on()
        await run
    assert_counts_add_up(world)


async def test_a_wrong_call_reward_may_be_corrected(world: Any) -> None:
    async with running(world) as (_, agents):
        session = await agents.open()
        call = agents.call(session)
        with pytest.raises(RollwireError) as raised:
            await agents.close(session, 0.0, call_rewards={"nonsense": 1.0})
        assert raised.value.reason == Reason.INVALID_FIELD
        await agents.close(session, 0.5, call_rewards={call: 1.0})
        (record,) = query(world, "SELECT record FROM arrivals")
        assert record


async def test_with_staleness_sessions_live_through_updates(world: Any) -> None:
    async with running(world, "max_staleness=1", "run.max_steps=4") as (run, agents):
        early = [await agents.open(), await agents.open()]
        for session in early:
            agents.call(session)  # drawn by version 0
        others = asyncio.create_task(agents.play_on())
        await until(lambda: world.rollout.version.step == 1 or run.done())
        for session in early:
            await agents.close(session)
        await others
        await run
    assert max(metrics["staleness/max"] for _, metrics in world.notes.steps) == 1
    assert all(not request.HasField("required_version") for request in world.rollout.opened)


async def test_what_was_acknowledged_survives_the_coordinator(world: Any) -> None:
    """I2: a group is completed with the episodes that the coordinator before had accepted."""
    async with running(world, "run.max_steps=2") as (run, agents):
        kept = await agents.play(0.25, "mine")
        orphan = await agents.open("mine")
        agents.call(orphan)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
    assert query(world, "SELECT task_name, state FROM arrivals") == [("mine", "waiting")]
    world.notes.notices.clear()
    resumed = asyncio.create_task(world.resume(*AGENTS, "run.max_steps=2"))
    async with following(world, resumed) as agents:
        agents.count = 100
        rest = await agents.open("mine")
        assert (rest.group_id, rest.episode_index) == (kept.group_id, 1)
        with pytest.raises(RollwireError) as raised:
            await agents.close(orphan)
        assert raised.value.reason == Reason.UNKNOWN_SESSION
        agents.call(rest)
        await agents.close(rest)
        await agents.play_on()
        await resumed
    scores = query(world, f"SELECT score FROM trajectories WHERE group_id = '{kept.group_id}' ORDER BY episode_index")
    assert scores == [(0.25,), (1.0,)]
    assert query(world, "SELECT COUNT(*), COUNT(DISTINCT trajectory_id) FROM step_trajectories") == [(8, 8)]
    assert orphan.session_id not in world.rollout.sessions
    assert_counts_add_up(world)


BAD_OPENS: list[tuple[dict[str, Any], str, str]] = [
    ({"request_id": ""}, "INVALID_FIELD", "request_id"),
    ({"request_id": "a b"}, "INVALID_FIELD", "request_id"),
    ({"request_id": "x" * 65}, "INVALID_FIELD", "request_id"),
    ({"task_name": "x" * 129}, "INVALID_FIELD", "task_name"),
    ({"task_name": "line\nbreak"}, "INVALID_FIELD", "task_name"),
    ({"lease": {"nanos": 5}}, "INVALID_FIELD", "lease"),
    ({"lease": {"seconds": 3601}}, "INVALID_FIELD", "lease"),
    ({"environment_tag": "Other"}, "UNKNOWN_ENVIRONMENT", ""),
    ({"environment_tag": "x" * (1 << 20)}, "UNKNOWN_ENVIRONMENT", ""),
]
BAD_CLOSES: list[tuple[dict[str, Any], str]] = [
    ({}, "result"),
    ({"completed": {"reward": float("nan")}}, "completed.reward"),
    ({"completed": {"reward": float("inf")}}, "completed.reward"),
    ({"completed": {"reward": -1e10}}, "completed.reward"),
    ({"completed": {"call_rewards": {"a": 1e10}}}, "completed.call_rewards['a']"),
    ({"completed": {"call_rewards": {"a": float("nan")}}}, "completed.call_rewards['a']"),
    ({"completed": {"metrics": {"a": float("-inf")}}}, "completed.metrics['a']"),
    ({"completed": {"metrics": {"ä": 1.0}}}, "completed.metrics"),
    ({"completed": {"metrics": {f"m{number}": 1.0 for number in range(257)}}}, "completed.metrics"),
    ({"failure": "x" * 4097}, "failure"),
]


async def test_bad_input(world: Any) -> None:
    async with running(world) as (_, agents):
        session = await agents.open()
        for fields, reason, path in BAD_OPENS:
            request = Request(**{"request_id": "r", "environment_tag": "Agent", **fields})
            with pytest.raises(RollwireError) as raised:
                await agents.client.open_agent_session(request)
            assert (raised.value.reason, list(raised.value.fields)) == (reason, [path] if path else []), fields
        for close, path in BAD_CLOSES:
            with pytest.raises(RollwireError) as raised:
                await agents.client.close_agent_session(Close(session_id=session.session_id, **close))
            assert (raised.value.reason, list(raised.value.fields)) == (Reason.INVALID_FIELD, [path]), close
        with pytest.raises(RollwireError) as raised:
            await agents.client.close_agent_session(Close(session_id="nobody", failure=""))
        assert raised.value.reason == Reason.UNKNOWN_SESSION
        agents.call(session)
        assert (await agents.close(session)).calls == 1, "bad calls cost the session nothing"


async def test_before_and_after(world: Any) -> None:
    release = asyncio.Event()
    world.rollout.before_update = release.wait
    async with running(world, "run.max_steps=1") as (run, agents):
        with pytest.raises(RollwireError) as raised:
            await agents.client.open_agent_session(Request(request_id="early", environment_tag="Agent"))
        assert raised.value.reason == Reason.NO_WEIGHTS and (raised.value.retry_after_s or 0) > 0
        release.set()
        await agents.play_on()
        with pytest.raises(RollwireError) as raised:
            await agents.client.open_agent_session(Request(request_id="late", environment_tag="Agent"))
        assert raised.value.reason == Reason.RUN_ENDED
        await run
