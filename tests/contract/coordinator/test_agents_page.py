"""The programs and configurations of docs/agents.md, as they stand there, against a run with small servers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollwire import policies
from rollwire.serving.config import load_config

from .test_outside_clients import query, running

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def program(marker: str) -> str:
    (found,) = [block for block in blocks("python") if marker in block]
    return found


def section_overrides(marker: str) -> list[str]:
    """The configuration with a marker, as overrides: every key that is not about addresses."""
    (found,) = [block for block in blocks("yaml") if marker in block]
    config = yaml.safe_load(found)
    overrides = [f"environments={json.dumps(config['environments'])}"]
    return [*overrides, "validation.episodes=0"]


@pytest.fixture
def edge(world: Any) -> Iterator[str]:
    """The least of an HTTP edge: answers chat completions, and counts each as a call of the key's session."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions" and request["model"] == "tiny"
            key = self.headers["Authorization"].removeprefix("Bearer ")
            digest = hashlib.sha256(key.encode()).digest()
            (session,) = [name for name, item in world.rollout.sessions.items() if item.key_digest == digest]
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "7"}}
            answer = {
                "id": world.rollout.call(session),
                "object": "chat.completion",
                "created": 0,
                "model": "tiny",
                "choices": [choice],
            }
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    world.rollout.base_url = f"http://127.0.0.1:{server.server_port}/v1"
    yield world.rollout.base_url
    server.shutdown()
    server.server_close()


async def run_program(text: str, address: str, directory: Path) -> str:
    """Runs a program of the page in a process of its own, to its end; returns what it printed."""
    assert "127.0.0.1:7700" in text
    path = directory / "program.py"
    path.write_text(text.replace("127.0.0.1:7700", address).replace("model/tokenizer.json", str(tokenizer())))
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PYTHONPATH": ":".join(entry for entry in sys.path if entry), "PATH": "", "NO_PROXY": "127.0.0.1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tokenizer() -> Path:
    return Path(policies.resolve("builtin:tiny")) / "tokenizer.json"


@pytest.mark.parametrize("marker", ["def play_one() -> None", "async def play_on() -> int"])
async def test_an_agent(world: Any, edge: str, tmp_path: Path, marker: str) -> None:
    async with running(world, *section_overrides("source: agent")) as (run, address):
        printed = await run_program(program(marker), address, tmp_path)
        summary = await run
    tags = query(world, "SELECT DISTINCT environment_tag FROM groups")
    assert (summary.totals.samples, tags) == (12, [("Riddles",)])
    if "print(" in program(marker):
        assert printed.strip() == "12"


async def test_a_pusher(world: Any, tmp_path: Path) -> None:
    world.learner.vocabulary_size = 1 << 20
    async with running(world, *section_overrides("source: pushed")) as (run, address):
        printed = await run_program(program("TrajectoryPusher("), address, tmp_path)
        summary = await run
    assert summary.totals.samples == 12
    assert printed.splitlines()[-1] == "the run has ended"


def test_every_program_of_the_page_is_run_here() -> None:
    tested = ["def play_one() -> None", "async def play_on() -> int", "TrajectoryPusher("]
    own_half = PAGE.partition("## The HTTP edge")[0] + PAGE.partition("## Pushed trajectories")[2]
    programs = re.findall(r"^```python\n(.*?)^```$", own_half, flags=re.MULTILINE | re.DOTALL)
    assert [sum(marker in text for marker in tested) for text in programs] == [1] * len(tested)


def test_the_configurations_of_the_page_are_valid(tmp_path: Path) -> None:
    found = blocks("yaml")
    assert len(found) >= 2
    for text in found:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        config = load_config(path)
        assert {entry.source for entry in config.environments} & {"agent", "pushed"} or "environments" not in text


def test_what_such_runs_log_is_documented() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    source = (ROOT / "services" / "rollwire" / "coordinator" / "external.py").read_text(encoding="utf-8")
    names = re.findall(r'"(agents/\w+)"', source)
    names += [
        f"pushed/{name}" for name in re.findall(r"for name in \(([^)]*)\)", source)[0].replace('"', "").split(", ")
    ]
    assert len(names) == 8
    assert [name for name in names if f"`{name}`" not in page] == []
