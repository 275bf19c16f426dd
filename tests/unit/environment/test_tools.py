"""Code of the policy, under limits, beside an environment."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rollwire.environment.tool_python import MAX_CODE_BYTES, PythonTool
from rollwire.environment.tools import Tools, code_in

PATIENT_S = 60.0


@pytest.fixture(scope="module")
def tool() -> PythonTool:
    return PythonTool(timeout_s=PATIENT_S, memory_mib=256, max_output_characters=200)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(6 * 7)", "42"),
        ("import sys\nprint('a'); print('b', file=sys.stderr, flush=True)", "b\na"),
        ("print('ü√')", "ü√"),
        ("", ""),
        ("import os\nprint(sorted(os.environ), os.listdir())", "['HOME', 'LANG', 'OPENBLAS_NUM_THREADS', 'PATH'] []"),
    ],
)
def test_code_that_works(tool: PythonTool, code: str, output: str) -> None:
    result = tool.run(code)
    assert result.ok
    assert sorted(result.output.split("\n")) == sorted(output.split("\n"))


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1 / 0", 'Traceback (most recent call last):\n  File "<code>", line 1, in <module>\nZeroDivisionError'),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("import sys; sys.exit(3)", ""),
        ("input()", "EOFError"),
        ("x = bytearray(10**9)", "MemoryError"),
        ("open('big', 'wb').write(bytes(10**8))", "File too large"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "[stopped by SIGKILL]"),
        ("while True: print('flood' * 100)", "[stopped: more than 200 characters of output]"),
        ("print('x' * 300)", "[cut after 200 characters]"),
        ("#" * (MAX_CODE_BYTES + 1), "allowed: at most 65536"),
    ],
)
def test_code_that_does_not(tool: PythonTool, code: str, output: str) -> None:
    result = tool.run(code)
    assert not result.ok
    assert output in result.output
    assert len(result.output) < 300


def test_an_endless_loop_is_stopped() -> None:
    began = time.monotonic()
    result = PythonTool(0.5, 256, 200).run("while True: pass")
    assert (result.ok, result.output) == (False, "[stopped after 0.5 s]")
    assert time.monotonic() - began < PATIENT_S


def test_a_process_that_it_leaves_behind_is_ended(tool: PythonTool) -> None:
    """As root, where processes are not limited; elsewhere there is none to leave behind."""
    result = tool.run("import os, time\nif os.fork() == 0:\n    time.sleep(600)\nelse:\n    print(os.getpid())")
    if os.geteuid() != 0:
        assert "BlockingIOError" in result.output
        return
    group = int(result.output)
    deadline = time.monotonic() + PATIENT_S
    while _members(group) and time.monotonic() < deadline:  # a process that was killed may take a moment to end
        time.sleep(0.01)
    assert _members(group) == []


def _members(group: int) -> list[list[str]]:
    """Living processes of a group, as fields of /proc/PID/stat after the name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(fields)
    return found


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("<python>print(1)</python>", "print(1)"),
        ("Let me see.\n```python\nx = 1\nprint(x)\n```\nDone.", "x = 1\nprint(x)\n"),
        ("```py\n1\n``` <python>2</python>", "1\n"),
        ("<python>2</python> ```py\n1\n```", "2"),
        ("<python>print(1)", None),
        ("python", None),
        ("<python>" * 50_000, None),
    ],
)
def test_code_is_found(response: str, code: str | None) -> None:
    assert code_in(response) == code


def test_turns_with_code_stand_beside_the_game() -> None:
    game = Tools("FrozenLake", {"max_steps": 2}, max_tool_uses=2, tool_timeout_s=PATIENT_S, tool_reward=-0.05)
    _, info = game.reset(42)
    assert game.max_turns == 4
    assert info["instructions"].startswith("You are solving the FrozenLake puzzle.")
    assert info["instructions"].endswith("You can do so 2 times.")
    observation, reward, terminated, truncated, info = game.step("<python>print(3 * 4)</python>")
    assert observation == "12\n[you can run code 1 more times]"
    assert (reward, terminated, truncated) == (-0.05, False, False)
    assert info["metrics"] == {"tool_use_counter": 1.0, "tool_success": 1.0}
    observation, *_, info = game.step("<answer>Left</answer>")
    assert observation.splitlines()[0] == "_P__"
    assert info["metrics"]["tool_use_counter"] == 0.0 and "tool_success" not in info["metrics"]
    assert info["metrics"]["action_is_valid"] == 1.0
    *_, truncated, info = game.step("<python>1/0</python>")
    assert (truncated, info["metrics"]["tool_success"]) == (False, 0.0)
    *_, truncated, info = game.step("<python>print(1)</python>")
    assert (truncated, info["metrics"]["action_is_valid"]) == (True, 0.0), "no use is left: it is an answer, the second"
    assert game.metrics_agg_mode["tool_use_counter"] == "sum" and game.metrics_agg_mode["success"] == "last"
    assert game.render_text() == observation


def test_the_turn_limit_of_the_game_holds_although_no_code_was_run() -> None:
    class Endless:
        max_turns = 2

        def reset(self, seed: int) -> Any:
            return "", {"suffix": "?"}

        def step(self, action: str) -> Any:
            return "", 0.0, False, False, {}

    game = Tools("FrozenLake", max_tool_uses=3)
    game._inner = Endless()
    game.reset(1)
    assert [game.step("x")[3] for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"type": "FrozenLik"}, "type is 'FrozenLik'; allowed: a built-in environment"),
        ({"type": "tools"}, "allowed: a type that is no wrapper"),
        ({"type": "FrozenLake", "options": {"sice": 3}}, "options.sice is 3; allowed: only the options"),
        ({"type": "FrozenLake", "options": {"size": 1}}, "size is 1"),
        ({"type": "FrozenLake", "max_tool_uses": 0}, "max_tool_uses is 0"),
        ({"type": "FrozenLake", "tool_timeout_s": 0}, "tool_timeout_s is 0; allowed: 0.1 to 600"),
        ({"type": "FrozenLake", "tool_memory_mib": 1}, "tool_memory_mib is 1"),
        ({"type": "FrozenLake", "max_output_characters": 0}, "max_output_characters is 0"),
    ],
)
def test_what_does_not_fit_is_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Tools(**settings)
