"""Groups on environments of providers that run as processes: killed, stopped, replaced. Nothing goes uncounted."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollwire.client.environment import EnvironmentClient
from rollwire.environment.service import EnvironmentServer
from rollwire.rpc.errors import RollwireError
from rollwire.serving.config.models import RunConfig
from rollwire.serving.server import Binding, serving
from rollwire.v1 import rollout_pb2, trajectory_pb2
from tests.contract.providers.conftest import offered, opening, until

PROGRAM = Path(__file__).parents[2] / "support" / "provider_program.py"
EPISODES = 6


@asynccontextmanager
async def environment_server(**providers: Any) -> AsyncIterator[EnvironmentClient]:
    config = RunConfig.model_validate({"environment": {"providers": providers}})
    async with (
        serving(EnvironmentServer(config), Binding(), grace_s=1) as running,
        EnvironmentClient(running.address) as client,
    ):
        yield client


@asynccontextmanager
async def provider(target: str, tag: str = "Slow", capacity: int = 8) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), target, tag, str(capacity), stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def outcomes(results: list[rollout_pb2.RunGroupResponse]) -> Counter[str]:
    """Counts results: `completed`, or why an episode failed; every requested episode is one of them."""
    assert sorted(
        (result.trajectory if result.HasField("trajectory") else result.failure).episode_index for result in results
    ) == list(range(EPISODES))
    for result in results:
        if result.HasField("trajectory"):
            assert result.trajectory.score == 1.5
    return Counter(
        "completed"
        if result.HasField("trajectory")
        else trajectory_pb2.FailureReason.Name(result.failure.reason).removeprefix("FAILURE_REASON_")
        for result in results
    )


def group(hold: Path | None = None) -> dict[str, Any]:
    request: dict[str, Any] = {"environment_tag": "Slow", "episodes": EPISODES}
    if hold is not None:
        request["environment_options"] = {"hold": str(hold)}
    return request


async def test_a_provider_killed_in_the_middle(serve: Any, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    async with environment_server(lease_s=1) as client, serve(services={"environment": [client.target]}) as bench:
        async with provider(client.target) as process:
            await offered(client, "Slow")
            playing = asyncio.create_task(bench.play(timeout_s=120, **group(hold)))
            await until((tmp_path / "held").exists)
            os.kill(process.pid, signal.SIGKILL)
            assert outcomes(await playing) == {"ENVIRONMENT_LOST": EPISODES}
        hold.unlink()
        async with provider(client.target):
            await offered(client, "Slow")
            assert outcomes(await bench.play(timeout_s=120, **group())) == {"completed": EPISODES}


async def test_one_of_two_providers_is_killed(serve: Any, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    async with environment_server(lease_s=1) as client, serve(services={"environment": [client.target]}) as bench:
        async with provider(client.target, capacity=3) as killed, provider(client.target, capacity=3):
            await offered(client, "Slow")
            await until(lambda: _six_fit(client))
            playing = asyncio.create_task(bench.play(timeout_s=120, **group(hold)))
            await until((tmp_path / "held").exists)

            async def all_are_open() -> bool:
                return (await client.list_environments()).open_sessions == EPISODES

            await until(all_are_open)
            os.kill(killed.pid, signal.SIGKILL)
            hold.unlink()
            found = outcomes(await playing)
        assert found["ENVIRONMENT_LOST"] <= 3
        assert found["completed"] >= 3
        assert sum(found.values()) == EPISODES


async def _six_fit(client: EnvironmentClient) -> bool:
    """Tells whether both providers have come: six sessions can be open at once."""
    opened: list[str] = []
    try:
        for _ in range(EPISODES):
            opened.append((await client.open_session(opening("Slow"))).session_id)
    except RollwireError:
        return False
    finally:
        for session_id in opened:
            await client.close_session(session_id)
    return True


async def test_sigterm_lets_running_episodes_end(serve: Any, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    async with (
        environment_server(lease_s=30) as client,
        serve(services={"environment": [client.target]}) as bench,
        provider(client.target) as process,
    ):
        await offered(client, "Slow")
        playing = asyncio.create_task(bench.play(timeout_s=120, **group(hold)))
        await until((tmp_path / "held").exists)
        process.send_signal(signal.SIGTERM)
        hold.unlink()
        found = outcomes(await playing)
        _, said = await process.communicate()
    assert found["completed"] >= 1
    assert process.returncode == 0, said.decode()
    assert b"Traceback" not in said


@pytest.mark.parametrize(
    ("target", "tag", "expected"),
    [
        ("nonsense", "Slow", "rollwire: target is 'nonsense'; allowed: host:port, such as 127.0.0.1:7001\n"),
        ("", "FrozenLake", "'FrozenLake', which this server hosts itself; attach under another\n"),
        ("", "a b", "rollwire: the tag is 'a b'; allowed: "),
    ],
)
async def test_a_refused_program_says_why_in_one_line(target: str, tag: str, expected: str) -> None:
    async with environment_server() as client, provider(target or client.target, tag) as process:
        _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert said.decode().count("\n") == 1
    assert expected in said.decode()
