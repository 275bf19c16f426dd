"""docs/environments.md, run as it stands there: its example, every configuration, every command."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollwire.client.png import PNG_SIGNATURE

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "environments.md"
OPENENV_SERVER = ROOT / "tests" / "support" / "openenv_guess.py"
OPENENV_ADDRESS = "http://127.0.0.1:8000"
# gem-llm cannot be installed on later versions of Python; there its definitions stop the server with a message.
HAS_GEM = sys.version_info[:3] <= (3, 12, 0)
ANSWERS = {
    "SeenLake": "<answer>Left</answer>",
    "SeenSokoban": "<answer>Up</answer>",
    "Guess": "7",
    "GuessInProcesses": "7",
    "BigLake": "<answer>Left</answer>",
    "Taxi": "<answer>South</answer>",
    "CliffWalking": "<answer>Up</answer>",
    "Blackjack": "<answer>hit</answer>",
    "GuessNumber": "\\boxed{5}",
    "Sudoku": "\\boxed{1 1 1}",
    "ChainSum": "<answer>12</answer>",
    "SumWithPython": "<python>print(6 * 7)</python>",
}
"""What is answered once in each environment that the page defines."""


def blocks(language: str) -> list[str]:
    """The code of the page, but for the section that tests/contract/providers runs."""
    page = re.sub(r"^## Serve from outside\n.*?(?=^## )", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def definitions() -> dict[str, Any]:
    """What each block of the page defines, by the block's first tag and type."""
    loaded = [yaml.safe_load(text).get("environment", {}).get("definitions", {}) for text in blocks("yaml")]
    return {f"{tags[0]}-{found[tags[0]]['type']}": found for found in loaded if (tags := list(found))}


DEFINITIONS = definitions()


@pytest.fixture
def guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "guess.py").write_text(next(text for text in blocks("python") if text.startswith('"""guess.py')))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("guess", None)


@pytest.fixture
def openenv() -> Iterator[str]:
    """A real OpenEnv server; its address."""
    with subprocess.Popen([sys.executable, str(OPENENV_SERVER)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.mark.usefixtures("guess")
async def test_the_example_can_be_registered_and_played(serve: Any, opening: Any) -> None:
    async with serve(definitions=DEFINITIONS["Guess-guess:GuessNumber"]) as client:
        listed = {item.tag: item for item in (await client.list_environments()).environments}
        assert listed["Guess"].summary == "Find the number; the answers are higher, lower and found."
        assert listed["BigLake"].max_turns == 50
        opened = await client.open_session(opening("Guess"))
        assert "from 1 to 1000" in opened.instructions
        opened = await client.open_session(opening("Guess", highest=2, max_turns=3))
        first = await client.step(opened.session_id, 0, "none")
        assert (first.reward, first.observation) == (-0.1, "That is no number.")
        replies = [await client.step(opened.session_id, 1, "1")]
        if not replies[0].terminated:
            replies.append(await client.step(opened.session_id, 2, "2"))
        assert (replies[-1].observation, replies[-1].reward, replies[-1].metrics["found"]) == ("found", 1.0, 1.0)


@pytest.mark.usefixtures("guess")
@pytest.mark.parametrize("name", [name for name in DEFINITIONS if HAS_GEM or not name.endswith("-gem")])
async def test_every_configuration_of_the_page_can_be_served_and_played(
    name: str, serve: Any, opening: Any, request: pytest.FixtureRequest
) -> None:
    found = DEFINITIONS[name]
    answers = dict(ANSWERS)
    if name == "Guess-openenv":
        assert found["Guess"]["options"]["url"] == OPENENV_ADDRESS
        found["Guess"]["options"]["url"] = request.getfixturevalue("openenv")
        answers["Guess"] = "<answer>7</answer>"
    async with serve(definitions=found) as client:
        for tag in found:
            opened = await client.open_session(opening(tag))
            assert not opened.failure.kind, opened.failure
            reply = await client.step(opened.session_id, 0, answers[tag])
            assert not reply.failure.kind, reply.failure
            assert reply.metrics.get("action_is_valid", 1.0) == 1.0
            for png in (opened.observation_png, reply.observation_png):
                assert png.startswith(PNG_SIGNATURE if tag.startswith("Seen") else b"")
                assert bool(png) == tag.startswith("Seen")
            if tag == "SumWithPython":
                assert reply.observation.startswith("42\n")
                assert (reply.metrics["tool_use_counter"], reply.metrics["tool_success"]) == (1.0, 1.0)
            await client.close_session(opened.session_id)


def commands() -> list[str]:
    """The commands of the page, without their comments."""
    lines = [line for text in blocks("") for line in text.splitlines() if "rollwire" in line]
    return [re.sub(r"\s+#.*", "", line) for line in lines]


async def test_every_command_of_the_page_works(serve: Any, tmp_path: Path, guess: None) -> None:
    found = commands()
    assert len(found) > 7
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({"environment": {"definitions": DEFINITIONS["Guess-guess:GuessNumber"]}})
    )
    async with serve() as client:
        for command in found:
            line = command.replace("127.0.0.1:7001", client.target).replace("--port 7001", "--port 0")
            line = line.replace("deploy/configs", str(ROOT / "deploy" / "configs"))
            if "rollwire launch" in line:  # tests/integration/test_mixed.py runs it
                line += " --dry-run"
            status, output = await _run(line, tmp_path, until="serving" if "rollwire serve" in line else None)
            assert status == 0, f"{line}\n{output}"


async def _run(line: str, directory: Path, until: str | None) -> tuple[int, str]:
    """Runs a line in a shell in which `rollwire` is this source tree's.

    With `until`, the command is ended by SIGTERM once it has printed that.
    """
    rollwire = directory / "bin" / "rollwire"
    rollwire.parent.mkdir(exist_ok=True)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    rollwire.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:"{shlex.quote(path)} exec {shlex.quote(sys.executable)} -m '
        'rollwire.cli.main "$@"\n'
    )
    rollwire.chmod(0o755)
    # The shell must not stand between a signal and the server.
    shell = line.replace("rollwire serve", "exec rollwire serve")
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", shell, cwd=directory, env={**os.environ, "PATH": f"{rollwire.parent}:{os.environ['PATH']}"},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    output = b""
    try:
        async with asyncio.timeout(120):
            while piece := await process.stdout.readline():
                output += piece
                if until and until.encode() in piece:
                    process.terminate()
                    until = None
            return await process.wait(), output.decode()
    finally:
        if process.returncode is None:
            process.kill()
