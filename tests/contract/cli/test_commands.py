"""The commands as a user calls them, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rollwire.serving.config import RunConfig

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "deploy" / "configs" / "frozenlake-tiny.yaml"


def rollwire(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollwire.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=cwd, env=environment())


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "COLUMNS": "200"}


def test_help_lists_the_commands_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from rollwire.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'grpc', 'numpy', 'pydantic', 'omegaconf'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("launch", "train", "serve", "status", "stop", "config", "env", "bench"):
        assert command in done.stdout


def test_a_dry_run_shows_configuration_arithmetic_and_processes_and_does_nothing(tmp_path: Path) -> None:
    done = rollwire("launch", EXAMPLE, "run.max_steps=7", "batch.groups_per_step=16", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "max_steps: 7" in done.stdout
    assert "16 groups x 8 episodes = 128" in done.stdout
    assert "7 steps x 128 = 896" in done.stdout
    for kind in ("environment", "learner", "rollout"):
        assert f"serve {kind}" in done.stdout
    assert list(tmp_path.iterdir()) == []
    done = rollwire("train", EXAMPLE, "services.learner=[10.0.0.1:5]", "--dry-run", cwd=tmp_path)
    assert "learner: 10.0.0.1:5" in done.stdout and "rollout: no address" in done.stdout


def test_config_show_is_a_configuration_and_schema_a_schema(tmp_path: Path) -> None:
    shown = rollwire("config", "show", EXAMPLE, "run.name=shown")
    assert RunConfig.model_validate(yaml.safe_load(shown.stdout)).run.name == "shown"
    assert json.loads(rollwire("config", "schema").stdout) == RunConfig.model_json_schema()


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["launch"], 2, "CONFIG is missing"),
        (["launch", "nowhere.yaml"], 2, "configuration file nowhere.yaml does not exist"),
        (["config", "import-roll", "nowhere.yaml"], 2, "configuration file nowhere.yaml does not exist"),
        (["config", "import-roll", EXAMPLE], 2, "no configuration of ROLL's agentic pipeline"),
        (["launch", EXAMPLE, "run.max_stps=3"], 2, "unknown key run.max_stps; did you mean run.max_steps?"),
        (["launch", EXAMPLE, "batch.episodes_per_group=1"], 2, "needs at least 2"),
        (["launch", EXAMPLE, "model.path=/nowhere"], 1, "model.path is '/nowhere': there is no such directory"),
        (["launch", EXAMPLE, "run.output_dir=/dev/null"], 1, "run.output_dir is '/dev/null', but"),
        (
            ["launch", EXAMPLE, "run.output_dir=/proc/no", "--dry-run"],
            1,
            "run.output_dir is '/proc/no', but /proc cannot",
        ),
        (["launch", EXAMPLE, "tracking.log_dir=/dev/null/no"], 1, "tracking.log_dir is '/dev/null/no', but"),
        (["train", EXAMPLE], 2, "services.environment is empty"),
        (["serve", "environment", "run.sed=1"], 2, "did you mean run.seed?"),
        (["serve", "environment", "--host", "0.0.0.0"], 1, "add --insecure"),
        (["serve", "environment", "--ready-file", "/nowhere/file"], 1, "its directory does not exist"),
        (["status", "nowhere"], 1, "allowed: a run directory, or HOST:PORT"),
        (["status", "127.0.0.1:9"], 1, "no coordinator answers at 127.0.0.1:9"),
        (["status", "."], 1, "is no run directory: it has no config.yaml"),
        (["stop", "."], 1, "is no run directory: it has no config.yaml"),
    ],
)
def test_mistakes_are_one_line_and_no_traceback(
    arguments: list[object], status: int, text: str, tmp_path: Path
) -> None:
    done = rollwire(*arguments, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = rollwire("serve", "environment", "--port", port)
    assert done.returncode == 1
    assert f"error: cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "rollwire.cli.main", "serve", "environment", "--ready-file", str(ready)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        end = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < end:
            time.sleep(0.02)
        assert json.loads(ready.read_text())["pid"] == server.pid
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=20)
        assert server.returncode == 0
        assert "Traceback" not in errors
    finally:
        server.kill()
        server.wait()


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """The parent is killed without a chance to clean up; no orphan remains."""
    ready = tmp_path / "ready.json"
    code = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-m', 'rollwire.cli.main', 'serve', 'environment', '--ready-file',"
        " sys.argv[1], f'--parent-pid={os.getpid()}'], start_new_session=True, stderr=subprocess.DEVNULL)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(ready)], env=environment())
    end = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < end:
        time.sleep(0.02)
    pid = json.loads(ready.read_text())["pid"]
    parent.kill()
    parent.wait()
    while time.monotonic() < end and is_running(pid):
        time.sleep(0.02)
    assert not is_running(pid)


def test_a_server_whose_parent_is_gone_already_does_not_start() -> None:
    done = rollwire("serve", "environment", "--parent-pid", 1)
    assert done.returncode == 1 and "the process 1 that started this server is gone" in done.stderr


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
