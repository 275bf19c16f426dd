"""The edge's framework is loaded only where it is wanted, and calls in progress survive the beginning of a shutdown."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import openai
import pytest
from scripted_edge import scripted_edge

from rollwire.rollout.agents import start
from rollwire.serving.config.sections import HttpSection
from rollwire.serving.server import ServeError


def test_a_server_without_an_edge_needs_no_web_framework() -> None:
    program = "import sys, rollwire.rollout.service; print({'starlette', 'uvicorn'} & set(sys.modules))"
    environment = {"PYTHONPATH": ":".join(entry for entry in sys.path if entry), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=200)
    assert done.stdout.strip() == "set()", done.stderr


def test_a_missing_web_framework_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start.listen(HttpSection()) is None
    monkeypatch.setitem(sys.modules, "rollwire.rollout.agents.http_server", None)
    with pytest.raises(ServeError, match=r"extra `agents`.*pip install 'rollwire\[agents\]'"):
        start.listen(HttpSection(address="127.0.0.1:0"))


async def test_a_call_in_progress_is_answered_while_the_server_drains() -> None:
    async with scripted_edge() as bench:
        client = await bench.open()
        bench.says("left<|im_end|>")
        bench.engine.permits = asyncio.Semaphore(0)
        call = asyncio.create_task(
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "one"}])
        )
        await asyncio.wait_for(bench.engine.waiting.wait(), 30)
        bench.http.drain()
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "two"}])
        for _ in range(10):
            bench.engine.permits.release()
        assert (await call).choices[0].message.content == "left"
