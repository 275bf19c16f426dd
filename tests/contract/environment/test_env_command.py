"""`rollwire env` and `rollwire bench environment` as a user runs them: in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import signal
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

PLUGINS = str(Path(__file__).parent / "plugins")


def environment(path: str = PLUGINS) -> dict[str, str]:
    found = {"COLUMNS": "120", **os.environ, "TERM": "xterm-256color"}
    found["PYTHONPATH"] = os.pathsep.join([path, *filter(None, [os.environ.get("PYTHONPATH")])])
    return found


async def rollwire(*arguments: str, typed: str = "", path: str = PLUGINS) -> tuple[int, str, str]:
    """Runs a command to its end; returns exit status, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollwire.cli.main", *arguments, env=environment(path),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(90):
            out, err = await process.communicate(typed.encode())
    finally:
        if process.returncode is None:
            process.kill()
    return await process.wait(), out.decode(), err.decode()


def _own_terminal(descriptor: int) -> None:
    """Makes a terminal the one whose Ctrl-C reaches this process, also where tests run in the background of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


async def keys(*arguments: str, typed: bytes, wait_for: str) -> tuple[int, str]:
    """Runs a command on a terminal, types once the screen shows `wait_for`; returns exit status and the screen."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollwire.cli.main", *arguments, env=environment(),
        stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=lambda: _own_terminal(theirs),
    )  # fmt: skip
    os.close(theirs)
    os.set_blocking(ours, False)
    screen = b""
    try:
        async with asyncio.timeout(90):
            running = True
            while running:
                running = process.returncode is None  # asked before reading: what came before the end is read too
                await asyncio.sleep(0.02)
                with contextlib.suppress(OSError):  # nothing to read yet, or the other end is closed
                    while piece := os.read(ours, 65536):
                        screen += piece
                if typed and wait_for.encode() in screen:
                    os.write(ours, typed)
                    typed = b""
    finally:
        if process.returncode is None:
            process.kill()
        os.close(ours)
    return await process.wait(), screen.decode(errors="replace")


@pytest.fixture
def configuration(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(
        "environment:\n  definitions:\n    Mine: {type: 'troublesome:Troublesome', options: {limit: 2}}\n"
        "    Big: {type: FrozenLake, options: {size: 7}}\n"
    )
    return str(path)


async def test_list_shows_built_in_environments_with_options() -> None:
    status, out, err = await rollwire("env", "list")
    assert (status, err) == (0, "")
    for text in (
        "FrozenLake",
        "FrozenLakeThink",
        "is_slippery false",
        "size 4",
        "text, png",
        "A lake crossed in turns",
        "dim_room [6, 6]",
        "type, for environment.definitions",
        "reasoning_gym",
        "dataset (required)",
    ):
        assert text in out


async def test_list_is_not_folded_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    status, out, _ = await rollwire("env", "list")
    assert status == 0
    assert "A lake crossed in turns; the map and the slips follow from the seed given to `reset`." in out


async def test_list_shows_environments_of_a_configuration(configuration: str) -> None:
    status, out, _ = await rollwire("env", "list", "--config", configuration)
    assert status == 0
    assert "Does what the action or the option says." in out
    assert "size 7" in out


async def test_list_asks_a_running_server(serve: Any, opening: Any) -> None:
    async with serve(max_sessions=5) as client:
        await client.open_session(opening())
        status, out, _ = await rollwire("env", "list", "--target", client.target)
    assert status == 0
    assert "Counts its turns." in out
    assert f"{client.target}: 1 of 5 sessions open" in out


async def test_play_reads_lines_and_ends_with_the_score() -> None:
    typed = "left\nnonsense\n<answer>Left</answer>\nDOWN\n down \ndown\n"
    status, out, err = await rollwire("env", "play", "FrozenLake", "--seed", "42", typed=typed)
    assert (status, err) == (0, "")
    assert "  __P_" in [line.rstrip() for line in out.splitlines()]
    assert "not a valid action" in out
    assert out.rstrip().endswith("finished after 6 turns: score 0.99")


async def test_sokoban_is_played_with_moves_too() -> None:
    status, out, err = await rollwire("env", "play", "SimpleSokoban", "--seed", "3", typed="up\nright\n")
    assert (status, err) == (0, "")
    assert "type a move (left, down, right, up)" in out
    assert "no way there" in out
    assert out.rstrip().endswith("stopped after 2 turns: score -0.2")


async def test_play_against_a_running_server_leaves_no_session(serve: Any) -> None:
    async with serve() as client:
        status, out, _ = await rollwire(
            "env", "play", "FrozenLakeThink", "--seed", "42", "-o", "max_steps=2", "--target", client.target,
            typed="up\nup\n",
        )  # fmt: skip
        assert (await client.list_environments()).open_sessions == 0
    assert status == 0
    assert "no way there" in out
    assert "out of turns after 2 turns: score 0" in out


async def test_play_ends_when_the_input_does() -> None:
    status, out, _ = await rollwire("env", "play", "FrozenLake", "--seed", "42", typed="left\n")
    assert status == 0
    assert "stopped after 1 turn: score 0" in out


async def test_play_a_custom_environment(configuration: str) -> None:
    status, out, _ = await rollwire("env", "play", "Mine", "--config", configuration, typed="hello\nleft\n")
    assert status == 0
    assert "1: hello" in out
    assert "2: left" in out  # verbatim: only the lake takes bare moves
    assert "out of turns after 2 turns: score 0.5" in out


async def test_play_with_arrow_keys_on_a_terminal() -> None:
    left, down = b"\x1b[D", b"\x1b[B"
    status, screen = await keys(
        "env",
        "play",
        "FrozenLake",
        "--seed",
        "42",
        typed=left + b"x" + b"a" + down + b"s" + down,
        wait_for="arrow keys",
    )
    assert status == 0
    assert "finished after 5 turns: score 1" in screen
    assert "\x1b[48;" in screen or ";48;" in screen  # tiles have colours
    assert screen.rstrip().endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
async def test_a_key_stops_the_game(key: bytes) -> None:
    status, screen = await keys("env", "play", "FrozenLake", typed=key, wait_for="arrow keys")
    assert status == 0
    assert "stopped after 0 turns: score 0" in screen


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["play", "Frozen"], "no environment has the tag 'Frozen' (did you mean FrozenLake?); registered: "),
        (["play", "FrozenLake", "-o", "size"], "--option is 'size'; allowed: KEY=VALUE, such as size=8"),
        (["play", "FrozenLake", "-o", "size=big"], "options.size is 'big'; allowed: a valid integer"),
        (["play", "FrozenLake", "-o", "size=1"], "size is 1; allowed: 2 to 64"),
        (["play", "FrozenLake", "-o", "size=2020-01-01"], "allowed: values that JSON can hold"),
        (["play", "FrozenLake", "--target", "127.0.0.1:1"], "no environment server answers at 127.0.0.1:1; start one"),
        (["list", "--target", "127.0.0.1:1"], "no environment server answers at 127.0.0.1:1; start one"),
        (["list", "--target", "somewhere"], "--target is 'somewhere'; allowed: HOST:PORT"),
        (["list", "--config", "missing.yaml"], "configuration file missing.yaml does not exist"),
        (["list", "--config", "a", "--target", "b:1"], "--config and --target exclude each other"),
    ],
)
async def test_mistakes_are_one_line(arguments: list[str], says: str) -> None:
    status, _, err = await rollwire("env", *arguments)
    assert status != 0
    assert says in err
    assert len(err.splitlines()) == 1


async def test_an_environment_that_fails_ends_the_game(configuration: str) -> None:
    status, _, err = await rollwire("env", "play", "Mine", "--config", configuration, typed="raise\n")
    assert status == 1
    first, *stack = err.splitlines()
    assert first == "error: environment Mine failed: ZeroDivisionError: cannot divide <path> by zero"
    assert stack[0] == "  Traceback (most recent call last):"
    assert "troublesome.py" in err and "  ZeroDivisionError: " in err


async def test_what_an_environment_prints_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("environment:\n  definitions:\n    Mine: {type: 'faulty:Faulty'}\n")
    status, out, err = await rollwire("env", "play", "Mine", "--config", str(path), typed="abort\n")
    assert status == 1
    assert "about to abort" not in out
    assert 0 <= err.index("about to abort") < err.index("error: environment Mine failed: Lost: its process was killed")


async def test_why_a_constructor_fails_is_seen(tmp_path: Path) -> None:
    (tmp_path / "unbuilt.py").write_text("class Unbuilt:\n    def __init__(self):\n        self.deck = {}['cards']\n")
    path = tmp_path / "run.yaml"
    path.write_text("environment:\n  definitions:\n    Mine: {type: 'unbuilt:Unbuilt'}\n")
    status, _, err = await rollwire("env", "play", "Mine", "--config", str(path), path=str(tmp_path))
    assert status == 1
    assert "unbuilt.py" in err and "self.deck = {}['cards']" in err
    assert "error: environment.definitions.Mine: unbuilt:Unbuilt cannot be constructed: KeyError: " in err


async def test_a_failure_elsewhere_names_the_log(serve: Any) -> None:
    async with serve() as client:
        status, _, err = await rollwire("env", "play", "Troublesome", "--target", client.target, typed="raise\n")
    assert status == 1
    assert err.rstrip().endswith("by zero; the log of its server or provider has the stack trace")
