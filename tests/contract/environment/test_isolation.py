"""Environments in processes that work: seats, reuse, drawings, options, and the ends of everything."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from rollwire.client.environment import EnvironmentClient
from rollwire.environment.isolation import launch, pool
from rollwire.environment.service import EnvironmentServer
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.serving.config.models import RunConfig
from rollwire.serving.server import ServeError
from rollwire.v1 import environment_pb2 as pb

Opening = Callable[..., pb.OpenSessionRequest]
Alive = Callable[[], set[int]]


def one(type_name: str = "faulty:Faulty", **changes: Any) -> dict[str, Any]:
    return {"Tag": {"type": type_name, **changes}}


async def step(client: EnvironmentClient, opened: pb.OpenSessionResponse, turn: int, action: str = "a") -> str:
    reply = await client.step(opened.session_id, turn, action)
    assert not reply.HasField("failure"), reply
    return reply.observation


async def open_patiently(client: EnvironmentClient, opening: Opening) -> pb.OpenSessionResponse:
    """Opens a session as soon as a seat is free: environments close after the reply to CloseSession."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await client.open_session(opening("Tag"))
            except RollwireError as error:
                assert error.reason == Reason.SESSIONS_EXHAUSTED
            await asyncio.sleep(0.02)


async def close(client: EnvironmentClient, opened: pb.OpenSessionResponse) -> None:
    await client.close_session(opened.session_id)


async def test_an_episode_is_the_same_as_in_the_server(serve: Any, opening: Opening) -> None:
    definitions = {
        "Process": {"type": "FrozenLake", "isolation": "process", "options": {"size": 5}},
        "Loop": {"type": "FrozenLake", "options": {"size": 5}},
    }
    async with serve(definitions=definitions) as client:
        descriptions = {item.tag: item for item in (await client.list_environments()).environments}
        descriptions["Process"].tag = "Loop"
        assert descriptions["Process"] == descriptions["Loop"]
        pairs = [await client.open_session(opening(tag, is_slippery=True)) for tag in definitions]
        ids = [opened.session_id for opened in pairs]
        for opened in pairs:
            opened.session_id = ""
        assert pairs[0] == pairs[1]
        for turn, move in enumerate(["Right", "Down", "nonsense", "Right", "Left"]):
            replies = [await client.step(name, turn, f"<answer>{move}</answer>") for name in ids]
            assert replies[0] == replies[1]
            if replies[0].terminated:
                break
        drawings = [await client.render(name, pb.RENDER_FORMAT_PNG) for name in ids]
        assert drawings[0] == drawings[1]


async def test_fields_of_every_kind_come_through(serve: Any, opening: Opening) -> None:
    async with serve(definitions=one()) as client:
        opened = await client.open_session(opening("Tag", seed=2**64 - 1, limit=3))
        assert (opened.instructions, opened.suffix, opened.max_turns) == (f"seed {2**64 - 1}", "?", 3)
        reply = await client.step(opened.session_id, 0, "\0 \u2028 ä " + "x" * 100_000)
        assert (reply.observation, reply.reward, reply.suffix) == (opened.observation, 0.5, "!")
        assert dict(reply.metrics) == {"turn": 1.0, "late": 1.0}
        listed = (await client.list_environments()).environments
        known = next(item for item in listed if item.tag == "Tag").metric_aggregation
        assert dict(known) == {"turn": pb.METRIC_AGGREGATION_LAST, "late": pb.METRIC_AGGREGATION_SUM}
        assert (await client.step(opened.session_id, 1, "picture")).observation_png.startswith(b"\x89PNG")
        assert (await client.render(opened.session_id, pb.RENDER_FORMAT_TEXT)).text == "turn 2"
        with pytest.raises(RollwireError) as caught:
            await client.render(opened.session_id, pb.RENDER_FORMAT_PNG)
        assert "cannot draw RENDER_FORMAT_PNG; it offers: RENDER_FORMAT_TEXT" in caught.value.message
        last = await client.step(opened.session_id, 2, "a")
        assert last.truncated and not last.terminated


@pytest.mark.parametrize("options", [{"limit": 1001}, {"limit": "many"}, {"lemit": 3}, {"limit": 2.5}])
async def test_options_that_are_refused_are_the_callers_mistake(
    serve: Any, opening: Opening, options: dict[str, Any]
) -> None:
    async with serve(definitions=one(), disable_after_failures=1) as client:
        with pytest.raises(RollwireError) as caught:
            await client.open_session(opening("Tag", **options))
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD)
        assert "allowed: " in caught.value.message
        assert (await client.open_session(opening("Tag"))).session_id


async def test_sessions_share_a_process_as_declared(serve: Any, opening: Opening) -> None:
    definitions = {
        "One": {"type": "faulty:Faulty"},
        "Three": {"type": "faulty:Shared"},
        "Two": {"type": "faulty:Shared", "sessions_per_process": 2},
    }
    async with serve(definitions=definitions) as client:
        for tag, sharing in (("One", 1), ("Two", 2), ("Three", 3)):
            opened = [await client.open_session(opening(tag)) for _ in range(6)]
            pids = [item.observation for item in opened]
            assert [pids.count(pid) for pid in pids] == [sharing] * 6
            assert [await step(client, item, 0) for item in opened] == pids


async def test_what_a_class_declares_decides_where_it_runs(serve: Any, opening: Opening, alive: Alive) -> None:
    async with serve(definitions=one("faulty:Threaded")) as client:
        assert (await client.open_session(opening("Tag"))).observation == str(os.getpid())
        assert not alive()
    async with serve(definitions=one("faulty:Threaded", isolation="process")) as client:
        assert (await client.open_session(opening("Tag"))).observation != str(os.getpid())
    async with serve(definitions=one("faulty:Shared", isolation="thread")) as client:
        assert (await client.open_session(opening("Tag"))).observation == str(os.getpid())


async def test_a_process_is_used_again_until_it_has_served_its_sessions(serve: Any, opening: Opening) -> None:
    async with serve(definitions=one(recycle_after_sessions=3, max_processes=1)) as client:
        pids = []
        for _ in range(7):
            opened = await open_patiently(client, opening)
            pids.append(await step(client, opened, 0, "stop"))
            await close(client, opened)
        assert len({*pids[:3]}) == len({*pids[3:6]}) == 1
        assert len({*pids}) == 3


async def test_a_process_in_which_an_episode_failed_is_not_used_again(
    serve: Any, opening: Opening, alive: Alive
) -> None:
    async with serve(definitions=one(sessions_per_process=2)) as client:
        failing, other = [await client.open_session(opening("Tag")) for _ in range(2)]
        assert failing.observation == other.observation
        await client.step(failing.session_id, 0, "raise")
        await close(client, failing)
        assert await step(client, other, 0) == other.observation  # it goes on to its end
        assert (await client.open_session(opening("Tag"))).observation != other.observation
        await close(client, other)
        await until(lambda: int(other.observation) not in alive())


async def test_idle_processes_end(serve: Any, opening: Opening, alive: Alive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "IDLE_S", 0.05)
    async with serve(definitions=one()) as client:
        zygote = alive()
        opened = await client.open_session(opening("Tag"))
        await close(client, opened)
        await until(lambda: alive() == zygote)
        assert await step(client, await client.open_session(opening("Tag")), 0)


async def test_more_sessions_than_seats_are_told_to_wait(serve: Any, opening: Opening) -> None:
    async with serve(definitions=one(max_processes=2, sessions_per_process=2)) as client:
        opened = [await client.open_session(opening("Tag")) for _ in range(4)]
        with pytest.raises(RollwireError) as caught:
            await client.open_session(opening("Tag"))
        assert (caught.value.code, caught.value.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            Reason.SESSIONS_EXHAUSTED,
        )
        assert caught.value.retry_after_s
        assert "all 2 processes of environment Tag are in use, each by 2 sessions" in caught.value.message
        assert (await client.open_session(opening("FrozenLake"))).session_id
        await close(client, opened[0])
        assert (await open_patiently(client, opening)).session_id


async def test_many_sessions_at_once(serve: Any, opening: Opening, gone: Any) -> None:
    async with serve(definitions=one(sessions_per_process=4)) as client:

        async def episode(number: int) -> None:
            opened = await client.open_session(opening("Tag", seed=number))
            assert opened.instructions == f"seed {number}"
            for turn in range(5):
                assert await step(client, opened, turn) == opened.observation
            await close(client, opened)

        await asyncio.gather(*(episode(number) for number in range(64)))
        assert (await client.list_environments()).open_sessions == 0
    await gone()


async def test_processes_draw_different_random_numbers(serve: Any, opening: Opening) -> None:
    async with serve(definitions=one()) as client:
        opened = [await client.open_session(opening("Tag")) for _ in range(3)]
        drawn = [(await step(client, item, 0, "random")).split() for item in opened]
        assert len({python for python, _ in drawn}) == len({numpy for _, numpy in drawn}) == 3


async def test_a_module_with_threads_is_not_forked(serve: Any, opening: Opening, gone: Any) -> None:
    async with serve(definitions=one("faulty_threads:NeedsItsThread")) as client:
        opened = await client.open_session(opening("Tag"))
        assert await step(client, opened, 0, "threads") == "2"
        assert (await client.step(opened.session_id, 1, "os exit")).failure.kind == pb.ENVIRONMENT_FAILURE_KIND_LOST
    await gone()


async def test_closing_a_session_closes_its_environment(serve: Any, opening: Opening, tmp_path: Path) -> None:
    async with serve(definitions=one()) as client:
        note = tmp_path / "closed"
        opened = await client.open_session(opening("Tag", note=str(note)))
        await step(client, opened, 0)
        await close(client, opened)
        await until(lambda: note.exists() and note.read_text() == "closed in turn 1")


async def test_an_environment_that_fails_to_start_is_closed(serve: Any, opening: Opening, tmp_path: Path) -> None:
    async with serve(definitions=one()) as client:
        note = tmp_path / "closed"
        opened = await client.open_session(opening("Tag", note=str(note), start_with="raise"))
        assert opened.failure.type == "ZeroDivisionError"
        assert note.read_text() == "closed in turn 0"


async def test_stopping_the_server_closes_environments(serve: Any, opening: Opening, tmp_path: Path, gone: Any) -> None:
    async with serve(definitions=one()) as client:
        for number in range(3):
            await client.open_session(opening("Tag", note=str(tmp_path / str(number))))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["closed in turn 0"] * 3
    await gone()


async def test_stopping_the_server_does_not_wait_for_what_hangs(serve: Any, opening: Opening, gone: Any) -> None:
    async with asyncio.timeout(60), serve(definitions=one(step_timeout_s=3600)) as client:
        opened = await client.open_session(opening("Tag"))
        hanging = asyncio.create_task(client.step(opened.session_id, 0, "deaf"))
        await client.list_environments()  # asked after the turn, on the same connection
    await asyncio.wait((hanging,))
    assert hanging.cancelled() or hanging.exception() is not None
    await gone()


async def test_a_lost_parent_of_processes_is_replaced(serve: Any, opening: Opening, alive: Alive, gone: Any) -> None:
    async with serve(definitions=one()) as client:
        (zygote,) = alive()
        opened = await client.open_session(opening("Tag"))
        os.kill(zygote, signal.SIGKILL)
        await until(lambda: not alive())
        reply = await client.step(opened.session_id, 0, "a")
        assert reply.failure.kind == pb.ENVIRONMENT_FAILURE_KIND_LOST
        assert "its process ended with its parent" in reply.failure.message
        assert await step(client, await client.open_session(opening("Tag")), 0)
    await gone()


@pytest.mark.parametrize(
    ("type_name", "says"),
    [
        ("faulty:CrashesWhenMade", "ended its process when it was constructed: killed by SIGABRT; it printed last: "),
        ("faulty:ExitsWhenMade", "cannot be loaded: SystemExit: 4"),
        ("faulty:Confused", "has isolation 'container'; allowed: thread or process"),
        ("faulty:Crowded", "has sessions_per_process 'many'; allowed: 1 to 1024"),
    ],
)
async def test_what_cannot_be_used_stops_the_server_with_one_line(type_name: str, says: str, gone: Any) -> None:
    with pytest.raises(ServeError) as caught:
        EnvironmentServer(RunConfig.model_validate({"environment": {"definitions": one(type_name)}}))
    assert str(caught.value).startswith("environment.definitions.Tag: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    await gone()


async def test_an_environment_that_is_never_constructed_stops_the_server(
    monkeypatch: pytest.MonkeyPatch, gone: Any
) -> None:
    monkeypatch.setattr(launch, "READY_TIMEOUT_S", 2.0)
    definitions = {"Tag": {"type": "faulty:HangsWhenMade"}, "Fine": {"type": "faulty:Faulty"}}
    with pytest.raises(ServeError, match="faulty:HangsWhenMade could not be constructed within 2 s"):
        EnvironmentServer(RunConfig.model_validate({"environment": {"definitions": definitions}}))
    await gone()


@asynccontextmanager
async def server_process(tmp_path: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, EnvironmentClient]]:
    config, ready = tmp_path / "run.yaml", tmp_path / "ready.json"
    config.write_text("environment:\n  definitions:\n    Tag: {type: 'faulty:Faulty'}\n")
    path = os.pathsep.join([str(Path(__file__).parent / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollwire.cli.main", "serve", "environment", str(config), "--ready-file", str(ready),
        env={**os.environ, "PYTHONPATH": path}, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await until(ready.exists)
        async with EnvironmentClient(json.loads(ready.read_text())["address"]) as client:
            assert await client.wait_ready(60)
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("action", ["a", "offspring"])
async def test_nothing_outlives_the_server(
    opening: Opening, tmp_path: Path, gone: Any, number: signal.Signals, action: str
) -> None:
    async with server_process(tmp_path) as (process, client):
        opened = [await client.open_session(opening("Tag")) for _ in range(3)]
        for item in opened:
            await step(client, item, 0, action)
        process.send_signal(number)
        async with asyncio.timeout(60):
            await process.wait()
    await gone()


async def test_a_server_killed_while_environments_hang_leaves_nothing(
    opening: Opening, tmp_path: Path, gone: Any
) -> None:
    async with server_process(tmp_path) as (process, client):
        opened = [await client.open_session(opening("Tag")) for _ in range(3)]
        actions = ("busy", "deaf", "stopped")
        hanging = [
            asyncio.create_task(client.step(item.session_id, 0, action))
            for item, action in zip(opened, actions, strict=True)
        ]
        await client.list_environments()
        process.kill()
        await process.wait()
        await asyncio.wait(hanging)
    await gone()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)
