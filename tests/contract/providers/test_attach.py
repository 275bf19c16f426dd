"""Environments of a provider, played through the server: the same sessions and rules as hosted ones."""

from __future__ import annotations

import asyncio
from types import ModuleType

import grpc
import pytest

from rollwire.client import serve_environment_async
from rollwire.rpc.errors import RollwireError
from rollwire.v1 import environment_pb2 as pb
from tests.contract.providers.conftest import Provide, Serve, gone, offered, opening, until


async def test_an_episode_of_a_provider(serve: Serve, provide: Provide, games: ModuleType) -> None:
    async with serve() as client, provide(client.target, {"Count": games.Counting}):
        await offered(client, "Count", "FrozenLake")
        listed = {entry.tag: entry for entry in (await client.list_environments()).environments}
        assert listed["Count"].summary == "Counts its turns."
        assert listed["Count"].max_turns == 5
        assert dict(listed["Count"].default_options) == {"limit": 5, "note": ""}
        assert listed["Count"].metric_aggregation["turn"] == pb.METRIC_AGGREGATION_LAST
        opened = await client.open_session(opening("Count", seed=7, note="hello", limit=3))
        assert (opened.observation, opened.instructions, opened.suffix) == ("seed 7 hello", "count", "?")
        assert (opened.max_turns, opened.lease.seconds) == (3, 60)
        first = await client.step(opened.session_id, 0, "a")
        assert (first.observation, first.reward, dict(first.metrics)) == ("1: a", 0.25, {"turn": 1.0})
        assert await client.step(opened.session_id, 0, "a") == first
        drawn = await client.render(opened.session_id, pb.RENDER_FORMAT_TEXT)
        assert drawn.text == "count 1"
        await client.step(opened.session_id, 1, "b")
        last = await client.step(opened.session_id, 2, "c")
        assert (last.terminated, last.truncated) == (False, True)
        with pytest.raises(RollwireError, match="episode has ended"):
            await client.step(opened.session_id, 3, "d")
        await client.close_session(opened.session_id)
        await until(lambda: "closed at 3" in games.log)
    assert games.log.count("step 1") == 1


async def test_a_gymnasium_shaped_environment(serve: Serve, provide: Provide, games: ModuleType) -> None:
    async with serve() as client, provide(client.target, {"Space": lambda: games.Space()}):
        await offered(client, "Space")
        opened = await client.open_session(opening("Space", seed=9))
        assert (opened.observation, opened.max_turns) == ("planet 9", 3)
        flags = [(await client.step(opened.session_id, turn, "on")).truncated for turn in range(3)]
        assert flags == [False, False, True]


async def test_options_are_checked_by_the_provider(serve: Serve, provide: Provide, games: ModuleType) -> None:
    async with serve() as client, provide(client.target, {"Count": games.Counting}):
        await offered(client, "Count")
        for options, message in (({"colour": "red"}, "only limit, note"), ({"limit": 101}, "allowed: at most 100")):
            with pytest.raises(RollwireError, match=message) as refused:
                await client.open_session(opening("Count", **options))
            assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert (await client.open_session(opening("Count"))).observation == "seed 1"


@pytest.mark.parametrize(
    ("action", "kind", "type_name"),
    [
        ("raise", pb.ENVIRONMENT_FAILURE_KIND_ERROR, "ZeroDivisionError"),
        ("exit", pb.ENVIRONMENT_FAILURE_KIND_ERROR, "SystemExit"),
        ("nan", pb.ENVIRONMENT_FAILURE_KIND_INVALID_RESULT, "InvalidResult"),
        ("long", pb.ENVIRONMENT_FAILURE_KIND_INVALID_RESULT, "InvalidResult"),
        ("hang", pb.ENVIRONMENT_FAILURE_KIND_TIMEOUT, "Timeout"),
    ],
)
async def test_failures_are_data(
    serve: Serve, provide: Provide, games: ModuleType, action: str, kind: int, type_name: str
) -> None:
    async with serve(step_timeout_s=1) as client, provide(client.target, {"Count": games.Counting}):
        await offered(client, "Count")
        opened = await client.open_session(opening("Count"))
        reply = await client.step(opened.session_id, 0, action)
        assert (reply.failure.kind, reply.failure.type) == (kind, type_name)
        assert "/srv" not in reply.failure.message
        assert reply.reward == 0
        with pytest.raises(RollwireError, match="episode has ended"):
            await client.step(opened.session_id, 1, "a")
        other = await client.open_session(opening("Count"))
        assert (await client.step(other.session_id, 0, "a")).reward == 0.25
        games.release.set()


async def test_five_failures_in_a_row_disable_the_tag_until_its_providers_are_started_anew(
    serve: Serve, provide: Provide, games: ModuleType
) -> None:
    async with serve(lease_s=1) as client:
        async with provide(client.target, {"Count": games.Counting}):
            await offered(client, "Count")
            for _ in range(5):
                opened = await client.open_session(opening("Count"))
                await client.step(opened.session_id, 0, "raise")
            with pytest.raises(RollwireError, match="is disabled: 5 episodes in a row failed") as refused:
                await client.open_session(opening("Count"))
            assert refused.value.reason == "ENVIRONMENT_DISABLED"
            await gone(client, "Count")
        async with provide(client.target, {"Count": games.Counting}):
            await offered(client, "Count")
            assert (await client.open_session(opening("Count"))).observation == "seed 1"


async def test_credits_are_used_up_and_come_back(serve: Serve, provide: Provide, games: ModuleType) -> None:
    async with serve() as client, provide(client.target, {"Count": games.Counting}, capacity=2):
        await offered(client, "Count")
        opened = [await client.open_session(opening("Count", seed=seed)) for seed in range(2)]
        with pytest.raises(RollwireError) as full:
            await client.open_session(opening("Count"))
        assert (full.value.reason, full.value.retry_after_s) == ("SESSIONS_EXHAUSTED", 1.0)
        await client.close_session(opened[0].session_id)
        again = await client.open_session(opening("Count", seed=5))
        assert again.observation == "seed 5"


async def test_sessions_are_balanced_among_providers_by_free_capacity(
    serve: Serve, provide: Provide, games: ModuleType
) -> None:
    class Left(games.Counting):  # type: ignore[name-defined, misc]
        """Counts its turns."""

        side = "left"

        def reset(self, seed: int) -> tuple[str, dict[str, str]]:
            return self.side, {}

    class Right(Left):
        """Counts its turns."""

        side = "right"

    async with (
        serve() as client,
        provide(client.target, {"Count": Left}, capacity=2),
        provide(client.target, {"Count": Right}, capacity=4),
    ):
        await offered(client, "Count")
        seen: list[str] = []

        async def six() -> bool:
            try:
                seen.append((await client.open_session(opening("Count"))).observation)
            except RollwireError as error:
                assert error.reason == "SESSIONS_EXHAUSTED"
            return len(seen) == 6

        await until(six)
        assert (seen.count("left"), seen.count("right")) == (2, 4)


async def test_a_provider_that_drains_ends_its_sessions_and_leaves(
    serve: Serve, provide: Provide, games: ModuleType
) -> None:
    async with serve() as client, provide(client.target, {"Count": games.Counting}, drain_timeout_s=60) as stop:
        await offered(client, "Count")
        opened = await client.open_session(opening("Count"))
        stop.set()
        await gone(client, "Count")
        with pytest.raises(RollwireError) as refused:
            await client.open_session(opening("Count"))
        assert refused.value.reason == "SESSIONS_EXHAUSTED"
        assert (await client.step(opened.session_id, 0, "still")).observation == "1: still"
        await client.close_session(opened.session_id)

        async def left() -> bool:
            try:
                await client.open_session(opening("Count"))
            except RollwireError as error:
                return error.reason == "UNKNOWN_ENVIRONMENT"
            return False

        await until(left)


async def test_refusals_are_one_line(serve: Serve, provide: Provide, games: ModuleType) -> None:
    async with serve(max_providers=1) as client:
        with pytest.raises(RollwireError, match="'FrozenLake', which this server hosts itself") as taken:
            await serve_environment_async(client.target, {"FrozenLake": games.Counting})
        assert taken.value.reason == "TAG_TAKEN"
        async with provide(client.target, {"Count": games.Counting}):
            await offered(client, "Count")
            with pytest.raises(RollwireError, match="takes 1 providers and has them"):
                await serve_environment_async(client.target, {"Other": games.Counting}, give_up_after_s=0)
    async with serve() as client, provide(client.target, {"Count": games.Counting}):
        await offered(client, "Count")
        with pytest.raises(RollwireError, match="describes 'Count' in another way") as mismatch:
            await serve_environment_async(client.target, {"Count": games.Space})
        assert mismatch.value.reason == "DESCRIPTION_MISMATCH"


async def test_a_server_that_is_not_there(games: ModuleType) -> None:
    with pytest.raises(RollwireError, match=r"no environment server takes this provider at 127\.0\.0\.1:1 ") as missing:
        await serve_environment_async("127.0.0.1:1", {"Count": games.Counting}, give_up_after_s=0)
    assert "rollwire serve environment" in missing.value.message


async def test_many_sessions_at_once(serve: Serve, provide: Provide, games: ModuleType) -> None:
    async with serve() as client, provide(client.target, {"Count": games.Counting}, capacity=32):
        await offered(client, "Count")

        async def episode(seed: int) -> float:
            opened = await client.open_session(opening("Count", seed=seed))
            total = 0.0
            for turn in range(5):
                total += (await client.step(opened.session_id, turn, "go")).reward
            await client.close_session(opened.session_id)
            return total

        assert await asyncio.gather(*(episode(seed) for seed in range(32))) == [1.25] * 32
