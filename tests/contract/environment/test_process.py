"""The server as a process: it stops on a signal, even while an environment hangs in a thread that nothing can stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from rollwire.client.environment import EnvironmentClient
from rollwire.v1 import environment_pb2 as pb


async def test_a_hanging_environment_does_not_keep_the_process_alive(opening: Any, tmp_path: Path) -> None:
    config, ready = tmp_path / "run.yaml", tmp_path / "ready.json"
    config.write_text(
        "environment:\n  definitions:\n"
        "    Troublesome: {type: 'troublesome:Troublesome', isolation: thread, step_timeout_s: 0.5}\n"
    )
    plugins = str(Path(__file__).parent / "plugins")
    path = os.pathsep.join([plugins, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollwire.cli.main", "serve", "environment", str(config), "--ready-file", str(ready),
        env={**os.environ, "PYTHONPATH": path}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            while not ready.exists():
                await asyncio.sleep(0.05)
            async with EnvironmentClient(json.loads(ready.read_text())["address"]) as client:
                assert await client.wait_ready(30)
                opened = await client.open_session(opening("Troublesome"))
                reply = await client.step(opened.session_id, 0, "hang")
                assert reply.failure.kind == pb.ENVIRONMENT_FAILURE_KIND_TIMEOUT
            process.send_signal(signal.SIGTERM)
            _, logged = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    events = [json.loads(line)["event"] for line in logged.decode().splitlines()]
    assert "environment hangs" in events
    assert events[-1] == "stopped"
