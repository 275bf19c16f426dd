"""The section "Serve from outside" of docs/environments.md, run as it stands there."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

from rollwire.client.environment import EnvironmentClient
from rollwire.environment.service import EnvironmentServer
from rollwire.serving.config.models import RunConfig
from rollwire.serving.server import Binding, serving
from tests.contract.providers.conftest import offered, opening

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()


def module(name: str) -> str:
    """Returns the block of Python whose docstring names a file."""
    (found,) = re.findall(rf'```python\n("""{re.escape(name)}: .*?)```', PAGE, re.DOTALL)
    return str(found)


def environment(directory: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), *filter(None, sys.path)])}


async def test_the_program_of_ten_lines(tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(module("guess.py"))
    program = module("serve_guess.py")
    assert len([line for line in program.splitlines() if line.strip()]) <= 10
    async with (
        serving(EnvironmentServer(RunConfig()), Binding(), grace_s=1) as running,
        EnvironmentClient(running.address) as client,
    ):
        (tmp_path / "serve_guess.py").write_text(program.replace("127.0.0.1:7001", running.address))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "serve_guess.py", cwd=tmp_path, env=environment(tmp_path), stderr=asyncio.subprocess.PIPE
        )
        try:
            await offered(client, "GuessOutside")
            start = await client.open_session(opening("GuessOutside", highest=2))
            assert "from 1 to 2" in start.instructions
            first = await client.step(start.session_id, 0, "1")
            if not first.terminated:
                first = await client.step(start.session_id, 1, "2")
            assert (first.observation, first.reward) == ("found", 1.0)
            await client.close_session(start.session_id)
            process.terminate()
            _, said = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 0
            assert said.decode().splitlines()[0] == f"rollwire: attached to {running.address}"
        finally:
            if process.returncode is None:
                process.kill()


def test_the_tests_of_the_example_pass(tmp_path: Path) -> None:
    for name in ("guess.py", "test_guess.py"):
        (tmp_path / name).write_text(module(name))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
