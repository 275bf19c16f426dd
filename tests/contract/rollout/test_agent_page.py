"""The half of docs/agents.md about the HTTP edge: its programs run, and its tables are those of the code."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted_edge import TOOLS_TEMPLATE

from rollwire.rollout.agents.parameters import WITHOUT_EFFECT
from rollwire.v1 import trajectory_pb2

from .test_agent_calls import HTTP, close, opening

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = trajectory_pb2.SamplingSettings(max_tokens=8)
PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## The HTTP edge", 1)[1].split("## Pushed trajectories", 1)[0]
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", SECTION, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TOOLS_TEMPLATE)
    return str(path)


@pytest.mark.parametrize("text", PROGRAMS)
async def test_a_program_of_the_page_makes_one_sequence(serve: Any, template: str, text: str) -> None:
    async with serve(rollout={"http": HTTP}, model={"chat_template": template}) as bench:
        opened = await bench.client.open_policy_session(opening(sampling=SETTINGS))

        def run() -> None:
            with openai.OpenAI(base_url=opened.base_url, api_key="key-s1", max_retries=0, timeout=60) as client:
                exec(compile(text, "docs/agents.md", "exec"), {"client": client})

        await asyncio.to_thread(run)
        closed = await close(bench, reward=1.0)
        assert closed.calls == 2 and len(closed.trajectory.sequences) == 1


def test_the_table_of_errors_is_complete() -> None:
    assert len(PROGRAMS) == 2
    table = set(re.findall(r"^\| (\d{3}) \| `(\w+)` \|", SECTION, flags=re.MULTILINE))
    source = "".join(path.read_text() for path in (ROOT / "services/rollwire/rollout/agents").glob("*.py"))
    raised = {code for _, code in re.findall(r'CallError\(\s*(\d{3}),\s*"(\w+)"', source)}
    raised |= set(re.findall(r'"(not_found|method_not_allowed)"', source))
    raised |= {"invalid_value"} | set(re.findall(r'"(unsupported_value)"', source))
    assert {code for _, code in table} == raised


def test_the_table_of_parameters_names_what_has_no_effect() -> None:
    (row,) = re.findall(r"^\| (.*) \| taken, without effect \|$", SECTION, flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == WITHOUT_EFFECT
