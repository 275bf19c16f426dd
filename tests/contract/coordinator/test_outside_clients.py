"""`open_agent_session`, `agent_session` and `TrajectoryPusher` against a run with small servers."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from cut_proxy import CutProxy

from rollwire.client import (
    AgentSession,
    Reason,
    RollwireError,
    RunEndedError,
    TrajectoryBuilder,
    TrajectoryPusher,
    agent_session,
    open_agent_session,
)
from rollwire.rpc.ids import new_id
from rollwire.v1 import coordinator_pb2 as pb
from rollwire.v1 import rollout_pb2, trajectory_pb2

AGENT = "environments=[{tag: Agent, source: agent, options: {level: 3}}]"
PUSHED = "environments=[{tag: Pushed, source: pushed}]"


def query(world: Any, text: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(world.run_dir.path / "run.db") as connection:
        return connection.execute(text).fetchall()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(world: Any, *overrides: str) -> AsyncIterator[tuple[asyncio.Task[Any], str]]:
    """A run and the address of its coordinator; the run is ended with the context."""
    run = asyncio.create_task(world.run("validation.episodes=0", *overrides))
    try:
        await until(lambda: run.done() or any("listens on" in text for text in world.notes.notices))
        (notice,) = [text for text in world.notes.notices if "listens on" in text]
        yield run, notice.split()[4]
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


async def test_agents_play_a_run_to_its_end(world: Any) -> None:
    async def agent(address: str) -> int:
        played = 0
        while True:
            try:
                async with open_agent_session(address, "Agent") as session:
                    assert (session.base_url, session.options) == ("http://127.0.0.1:1/v1", {"level": 3})
                    call = world.rollout.call(session.session_id)
                    await session.finish(0.25, call_rewards={call: 0.5}, metrics={"success": 1.0})
                    played += 1
            except RunEndedError:
                return played

    async with running(world, AGENT) as (run, address):
        played = await asyncio.gather(agent(address), agent(address), agent(address))
        summary = await run
    assert sum(played) == summary.totals.samples == 12
    assert {score for (score,) in query(world, "SELECT score FROM trajectories")} == {0.75}
    assert world.status.latest["env/Agent/success"] == 1.0


async def test_a_block_without_a_result_is_a_failure_with_its_reason(world: Any) -> None:
    async with running(world, AGENT, "run.max_steps=1") as (run, address):
        with pytest.raises(LookupError):  # with half of a character in its text, which gRPC does not carry
            async with open_agent_session(address, "Agent", task_name="a") as session:
                raise LookupError("tool \ud83d")
        async with open_agent_session(address, "Agent", task_name="a") as session:
            world.rollout.call(session.session_id)
        with pytest.raises(ValueError, match="finish it once, inside its block"):
            await session.finish(1.0)
        async with open_agent_session(address, "Agent", task_name="b") as session:
            await session.fail("x" * 10_000)
        while True:
            try:
                async with open_agent_session(address, "Agent", task_name="a") as session:
                    world.rollout.call(session.session_id)
                    await session.finish(1.0)
                async with open_agent_session(address, "Agent", task_name="b") as session:
                    world.rollout.call(session.session_id)
                    await session.finish(1.0)
            except RunEndedError:
                break
        await run
    messages = [message for (message,) in query(world, "SELECT message FROM failures ORDER BY rowid")]
    assert sorted(messages) == ["LookupError: tool ?", "the agent left its session without a result", "x" * 4096]


async def test_programs_that_are_not_asynchronous(world: Any) -> None:
    def agent(address: str) -> int:
        played = 0
        while True:
            try:
                with agent_session(address, "Agent") as session:
                    if not played:
                        with pytest.raises(RollwireError) as raised:
                            session.finish(1.0, call_rewards={"nonsense": 1.0})
                        assert raised.value.reason == Reason.INVALID_FIELD and not session.finished
                    world.rollout.call(session.session_id)
                    session.finish(1.0)
                    played += 1
            except RunEndedError:
                return played

    def broken(address: str) -> None:
        with agent_session(address, "Agent"):
            raise ValueError("no")

    async with running(world, AGENT) as (run, address):
        with pytest.raises(ValueError, match="no"):
            await asyncio.to_thread(broken, address)
        played = await asyncio.gather(*(asyncio.to_thread(agent, address) for _ in range(3)))
        await run
    assert sum(played) == 12
    assert query(world, "SELECT reason, message FROM failures") == [("agent_failed", "ValueError: no")]


async def test_a_session_waits_for_its_turn_but_not_for_ever(world: Any) -> None:
    async with running(world, AGENT) as (_, address):
        held: list[AgentSession] = []

        async def hold(release: asyncio.Event) -> None:
            async with open_agent_session(address, "Agent") as session:
                held.append(session)
                await release.wait()
                world.rollout.call(session.session_id)
                await session.finish(1.0)

        release = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(hold(release))
            await until(lambda: len(held) == 4)
            with pytest.raises(RollwireError) as raised:
                async with open_agent_session(address, "Agent", wait_s=0.1):
                    raise AssertionError("there is nothing to play")
            assert raised.value.reason == Reason.EPISODES_EXHAUSTED
            late = group.create_task(hold(release))
            release.set()
            await late
        assert len(held) == 5


async def test_an_agent_outlives_a_broken_connection(world: Any) -> None:
    async with running(world, AGENT) as (_, address), CutProxy(address) as proxy:
        async with open_agent_session(proxy.address, "Agent") as session:
            proxy.cut()
            world.rollout.call(session.session_id)
            await session.finish(1.0)
        assert proxy.connections >= 2
        assert query(world, "SELECT COUNT(*) FROM arrivals") == [(1,)]


async def test_a_coordinator_that_is_not_there(unused_tcp_port: int) -> None:
    with pytest.raises(RollwireError) as raised:
        async with open_agent_session(f"127.0.0.1:{unused_tcp_port}", "Agent", lost_s=0.2):
            raise AssertionError("nobody can have answered")
    assert raised.value.reason == Reason.TRANSPORT


@pytest.fixture
def unused_tcp_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def episodes(terms: pb.GetSubmissionTermsResponse) -> list[trajectory_pb2.Trajectory]:
    """A group of one-turn episodes, as if drawn by the newest version."""
    group, found = new_id("group"), []
    for index in range(terms.episodes_per_group):
        builder = TrajectoryBuilder(terms, "Pushed", group_id=group, episode_index=index, environment_seed=1)
        drawn = rollout_pb2.GenerateResponse(token_ids=[3, 4], logprobs=[-1, -1], version=terms.version)
        builder.add_turn([1, 2], [drawn], reward=float(index), terminated=True)
        found.append(builder.build({"success": float(index)}))
    return found


async def test_a_pusher_trains_a_run_over_one_stream(world: Any) -> None:
    statuses = []
    async with running(world, PUSHED) as (run, address), TrajectoryPusher(address, "Pushed") as pusher:

        async def play() -> AsyncIterator[trajectory_pb2.Trajectory]:
            while True:
                for item in episodes(await pusher.wait_wanted(poll_s=0.01)):
                    yield item

        with pytest.raises(RunEndedError):
            async for answer in pusher.submit(play()):
                statuses.append(answer.status)
        summary = await run
    assert summary.totals.samples == 12
    assert statuses.count(pb.SUBMISSION_STATUS_ACCEPTED) >= 12, "those played ahead may be too old"
    assert pb.SUBMISSION_STATUS_REJECTED not in statuses


async def test_a_pusher_outlives_broken_connections_and_nothing_is_trained_twice(world: Any) -> None:
    """I1, I2: the connection breaks after every few answers, wherever that may be."""
    answered: list[str] = []
    sent: list[str] = []
    async with (
        running(world, PUSHED, "run.max_steps=4") as (run, address),
        CutProxy(address) as proxy,
        TrajectoryPusher(proxy.address, "Pushed") as pusher,
    ):

        async def play() -> AsyncIterator[trajectory_pb2.Trajectory]:
            while True:
                for item in episodes(await pusher.wait_wanted(poll_s=0.01)):
                    sent.append(item.trajectory_id)
                    yield item

        with pytest.raises(RunEndedError):
            async for answer in pusher.submit(play()):
                assert answer.status != pb.SUBMISSION_STATUS_REJECTED, answer
                answered.append(answer.trajectory_id)
                if len(answered) % 3 == 0 and len(answered) < 13:
                    proxy.cut()
        await run
    assert answered == sent[: len(answered)], "answers come once each, in order"
    assert proxy.connections >= 4
    trained = query(world, "SELECT COUNT(*), COUNT(DISTINCT trajectory_id) FROM step_trajectories")
    assert trained == [(16, 16)]


async def test_what_the_users_iterator_raises_is_raised_after_the_answers(world: Any) -> None:
    async with running(world, PUSHED) as (_, address), TrajectoryPusher(address, "Pushed") as pusher:
        terms = await pusher.wait_wanted()

        def broken() -> Any:
            yield from episodes(terms)
            raise ValueError("the game broke")

        answers = []
        with pytest.raises(ValueError, match="the game broke"):
            async for answer in pusher.submit(broken()):
                answers.append(answer.status)
        assert answers == [pb.SUBMISSION_STATUS_ACCEPTED] * 2
        (bad,) = await pusher.submit_all([trajectory_pb2.Trajectory(trajectory_id="x", group_id="g")])
        assert bad.status == pb.SUBMISSION_STATUS_REJECTED
