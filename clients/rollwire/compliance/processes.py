"""Programs under test: an environment server, and a provider that attaches to it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from rollwire.client.environment import EnvironmentClient

START_LIMIT_S: Final = 120.0
_END_LIMIT_S: Final = 60.0
_POLL_S: Final = 0.05


@asynccontextmanager
async def environment_server() -> AsyncIterator[str]:
    """Runs `rollwire serve environment`; gives its address."""
    with tempfile.TemporaryDirectory() as directory:
        ready = Path(directory) / "ready.json"
        command = [sys.executable, "-m", "rollwire.cli.main", "serve", "environment", f"--ready-file={ready}"]
        async with program([*command, "environment.providers.lease_s=30"]) as process:

            async def bound() -> bool:
                return ready.exists()

            await until(bound, process, "the environment server has bound a port")
            yield json.loads(ready.read_text())["address"]


@asynccontextmanager
async def program(command: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a program, and ends it with SIGTERM, or with SIGKILL when it does not listen."""
    # What can be imported here can be imported there.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, "PYTHONPATH": path})
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(_END_LIMIT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def offered(target: str, tag: str, process: asyncio.subprocess.Process) -> None:
    """Waits until the server offers a tag of the provider that `process` is."""

    async def listed() -> bool:
        async with EnvironmentClient(target) as client:
            return tag in {entry.tag for entry in (await client.list_environments()).environments}

    await until(listed, process, f"the provider offers {tag}")


async def until(
    condition: Callable[[], Coroutine[Any, Any, bool]], process: asyncio.subprocess.Process, what: str
) -> None:
    """Waits for a condition that a running program brings about.

    Raises:
        AssertionError: The program has ended, or the condition did not come true.
    """
    end_s = asyncio.get_running_loop().time() + START_LIMIT_S
    while not await condition():
        assert process.returncode is None, f"the program ended with status {process.returncode} before {what}"
        assert asyncio.get_running_loop().time() < end_s, f"not within {START_LIMIT_S:g} s: {what}"
        await asyncio.sleep(_POLL_S)
