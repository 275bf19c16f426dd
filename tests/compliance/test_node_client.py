"""The Node client's own tests, and its README, run as it stands there."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rollwire.client.environment import EnvironmentClient
from rollwire.compliance.processes import environment_server, offered, program
from rollwire.v1 import environment_pb2 as pb

NODE = Path(__file__).parents[2] / "clients" / "node"
pytestmark = pytest.mark.usefixtures("node_modules")


def executable(name: str) -> str:
    found = shutil.which(name)
    assert found is not None, f"{name} is not installed"
    return found


def test_its_own_tests_pass() -> None:
    done = subprocess.run(
        [executable("npm"), "test"], cwd=NODE, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"# pass [1-9]", done.stdout)


async def test_the_environment_of_its_readme(tmp_path: Path) -> None:
    (found,) = re.findall(r"```js\n(.*?)```", (NODE / "README.md").read_text(), re.DOTALL)
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "rollwire").symlink_to(NODE)
    async with environment_server() as address, EnvironmentClient(address) as client:
        (tmp_path / "guess.mjs").write_text(found.replace("127.0.0.1:7001", address))
        async with program([executable("node"), str(tmp_path / "guess.mjs")]) as process:
            await offered(address, "Guess", process)
            request = pb.OpenSessionRequest(request_id="readme", environment_tag="Guess", seed=2**64 - 1)
            start = await client.open_session(request)
            assert start.max_turns == 8
            reply = await client.step(start.session_id, 0, str((2**64 - 1) % 100 + 1))
            assert (reply.observation, reply.reward, reply.terminated) == ("found", 1.0, True)
            await client.close_session(start.session_id)
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_a_refusal_is_one_line() -> None:
    async with environment_server() as address:
        command = [executable("node"), str(NODE / "examples" / "serve_frozen_lake.js"), address, "FrozenLake"]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert said.decode().count("\n") == 1
    assert "'FrozenLake', which this server hosts itself" in said.decode()
