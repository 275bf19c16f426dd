"""The launcher with small children that behave in the ways that servers may."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rollwire.coordinator.errors import RunError
from rollwire.coordinator.launcher import KINDS, LocalLauncher, child_command, child_environment
from rollwire.coordinator.run_dir import create_run_dir
from rollwire.serving.config import load_config

READY = (
    "import json, os, sys, time, signal, subprocess\n"
    "kind, ready = sys.argv[1:]\n"
    "def bind():\n"
    "    with open(ready + '.partial', 'w') as file: json.dump({'address': f'127.0.0.1:{1000 + len(kind)}'}, file)\n"
    "    os.replace(ready + '.partial', ready)\n"
)
OBEDIENT = READY + "bind(); time.sleep(60)\n"

Launch = Callable[..., LocalLauncher]


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    """Makes a launcher whose children run the given code, by kind; others are obedient."""
    made: list[LocalLauncher] = []

    def make(ready_s: float = 20.0, **code: str) -> LocalLauncher:
        config = load_config(None, [f"run.output_dir={tmp_path}", f"timeouts.ready_s={ready_s}"])
        run_dir = create_run_dir(config, datetime.now(UTC))

        def command(kind: str, path: Path) -> list[str]:
            return [sys.executable, "-c", code.get(kind, OBEDIENT), kind, str(path / f"{kind}.json")]

        made.append(LocalLauncher(config, run_dir, command))
        return made[-1]

    yield make
    for launcher in made:
        await launcher.stop()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_addresses_and_an_end_without_remains(launch: Launch, tmp_path: Path) -> None:
    launcher = launch()
    services = await launcher.start()
    assert (services.environment, services.learner) == (["127.0.0.1:1011"], ["127.0.0.1:1007"])
    pids = dict(launcher.pids)
    assert sorted(pids) == sorted(KINDS)
    assert all(os.getsid(pid) == pid for pid in pids.values()), "Ctrl-C in the terminal does not reach them"
    assert launcher.death() is None
    await launcher.stop()
    assert not any(is_running(pid) for pid in pids.values())
    assert not list(tmp_path.glob("runs/*/*/*.json")), "addresses of servers that are gone are gone"


async def test_a_child_that_cannot_start_is_quoted(launch: Launch) -> None:
    launcher = launch(
        learner="import sys; print('noise'); print('error: model.path is wrong', file=sys.stderr); sys.exit(1)"
    )
    with pytest.raises(RunError) as error:
        await launcher.start()
    assert str(error.value) == "the learner server ended with status 1: model.path is wrong"


async def test_a_child_that_crashes_shows_the_end_of_its_log(launch: Launch) -> None:
    code = READY + (
        "bind()\n"
        "line = {'level': 'info', 'timestamp': 't'}\n"
        "for n in range(20): print(json.dumps({**line, 'event': f'line {n}', 'a': n}), flush=True)\n"
        "raise ZeroDivisionError('boom')\n"
    )
    launcher = launch(rollout=code)
    with pytest.raises(RunError) as error:
        await launcher.start()
        await asyncio.wait_for(launcher.watch(), 20)
    first, *rest = str(error.value).splitlines()
    assert first.startswith("the rollout server ended with status 1; its log is ") and "rollout.log" in first
    assert "  info: line 19 a=19" in rest and rest[-1] == "  ZeroDivisionError: boom"
    assert len(rest) == 10


async def test_a_child_that_was_killed_names_the_signal(launch: Launch) -> None:
    launcher = launch()
    await launcher.start()
    os.kill(launcher.pids["environment"], signal.SIGKILL)
    with pytest.raises(RunError, match="the environment server was killed by SIGKILL"):
        await asyncio.wait_for(launcher.watch(), 20)


async def test_a_child_that_never_binds_a_port_is_named(launch: Launch) -> None:
    launcher = launch(ready_s=0.3, environment="import time; time.sleep(60)")  # the first that is looked at
    with pytest.raises(
        RunError,
        match=r"the environment server bound no port within timeouts.ready_s=0.3 s; its log is .*environment.log",
    ):
        await launcher.start()


async def test_a_stubborn_child_and_its_own_children_are_killed(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rollwire.coordinator.launcher.STOP_GRACE_S", 0.3)
    code = READY + (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'grandchild')!r}, 'w').write(str(child.pid))\n"
        "bind(); time.sleep(60)\n"
    )
    launcher = launch(learner=code)
    await launcher.start()
    pid, grandchild = launcher.pids["learner"], int((tmp_path / "grandchild").read_text())
    await launcher.stop()
    end = time.monotonic() + 5
    while is_running(grandchild) and time.monotonic() < end:
        await asyncio.sleep(0.02)
    assert not is_running(pid) and not is_running(grandchild)


def test_the_command_of_a_server(tmp_path: Path) -> None:
    command = child_command("rollout", tmp_path)
    assert command[:6] == [sys.executable, "-P", "-m", "rollwire.cli.main", "serve", "rollout"]
    assert f"run.output_dir={tmp_path}" in command, "what a server writes belongs into the run's directory"
    assert f"--parent-pid={os.getpid()}" in command


def test_the_environment_of_a_server() -> None:
    config = load_config(None, ["rollout.torch_threads=3", "learner.torch_threads=0"])
    assert child_environment("rollout", config)["OMP_NUM_THREADS"] == "3"
    assert child_environment("environment", config)["OMP_NUM_THREADS"] == "1"
    assert child_environment("rollout", config)["MALLOC_ARENA_MAX"] == "1"
    assert json.dumps(child_environment("learner", config).get("OMP_NUM_THREADS")) == json.dumps(
        os.environ.get("OMP_NUM_THREADS")
    )
