"""`rollwire train`, `status` and `stop` as processes, against small servers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Rollwire = Callable[..., Awaitable[Process]]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "COLUMNS": "200"}


@pytest.fixture
async def rollwire() -> AsyncIterator[Rollwire]:
    """Starts commands; what still runs at the end of a test is killed."""
    started: list[Process] = []

    async def start(*arguments: object) -> Process:
        command = [sys.executable, "-m", "rollwire.cli.main", *map(str, arguments)]
        started.append(await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, env=environment()))
        return started[-1]

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def finish(process: Process) -> tuple[int | None, str, str]:
    output, errors = await asyncio.wait_for(process.communicate(), 100)
    return process.returncode, output.decode(), errors.decode()


def write_config(world: Any, **run: Any) -> Path:
    config = {
        "run": {"name": "lake", "max_steps": 3, "output_dir": str(world.directory / "out"), **run},
        "batch": {"groups_per_step": 2, "episodes_per_group": 2},
        "validation": {"episodes": 3},
        "algorithm": {"filter_zero_variance": False},
        "services": {
            "environment": [world.hosts[world.environment].address],
            "rollout": [world.hosts[world.rollout].address],
            "learner": [world.hosts[world.learner].address],
        },
    }
    path: Path = world.directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


async def first_step(process: Process) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        if line.startswith(b"step "):
            return


def run_dir(world: Any) -> Path:
    (path,) = (world.directory / "out" / "runs" / "lake").iterdir()
    return Path(path)


def state(world: Any) -> str:
    with sqlite3.connect(run_dir(world) / "run.db") as connection:
        return str(connection.execute("SELECT state FROM run").fetchone()[0])


async def test_a_run_from_the_command_line(world: Any, rollwire: Rollwire) -> None:
    status, output, errors = await finish(await rollwire("train", write_config(world)))
    assert (status, errors) == (0, "")
    lines = output.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith(("step", "validation"))] == [
        "validation after 0 steps",
        "step 1/3",
        "step 2/3",
        "step 3/3",
        "validation after 3 steps",
    ]
    assert "validation success, FrozenLake" in output
    assert f"tensorboard --logdir {world.directory}/out/tensorboard/lake" in output
    assert len(list((world.directory / "out" / "tensorboard" / "lake").glob("*/events.out.tfevents.*"))) == 1
    assert sorted(path.name for path in run_dir(world).iterdir()) == ["config.yaml", "logs", "metrics.jsonl", "run.db"]
    status, output, _ = await finish(await rollwire("status", run_dir(world)))
    assert status == 0 and "finished, 3 steps committed" in output


async def test_status_and_stop(world: Any, rollwire: Rollwire) -> None:
    process = await rollwire("train", write_config(world, max_steps=100_000))
    await first_step(process)
    status, output, _ = await finish(await rollwire("status", run_dir(world)))
    assert status == 0 and "running" in output and world.hosts[world.learner].address in output
    status, output, _ = await finish(await rollwire("stop", run_dir(world), "--cause", "seen enough"))
    assert (status, output) == (0, "stopping\n")
    status, output, _ = await finish(process)
    assert status == 0 and "stopped early  seen enough" in output
    assert output.splitlines()[-1] == f"resume with: rollwire train --resume {run_dir(world)}"
    assert state(world) == "stopped"


async def test_one_interrupt_ends_a_run_cleanly(world: Any, rollwire: Rollwire) -> None:
    process = await rollwire("train", write_config(world, max_steps=100_000))
    await first_step(process)
    process.send_signal(signal.SIGINT)
    status, output, errors = await finish(process)
    assert (status, errors) == (130, "")
    assert "ended by SIGINT after" in output
    assert state(world) == "cancelled"


async def test_two_interrupts_end_it_at_once(world: Any, rollwire: Rollwire) -> None:
    async def hang(request: Any) -> None:
        if request.group_id == "g00000002":
            await asyncio.sleep(60)

    world.rollout.before_group = hang
    process = await rollwire("train", write_config(world))
    await first_step(process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    status, _, errors = await finish(process)
    assert status == 130 and "Traceback" not in errors


async def test_errors_of_a_run_are_one_line(world: Any, rollwire: Rollwire) -> None:
    world.rollout.digest_of = lambda step: b"x" * 32
    status, _, errors = await finish(await rollwire("train", write_config(world)))
    assert status == 1
    problem, advice = errors.splitlines()
    assert problem.startswith("error: the rollout server at 127.0.0.1:")
    assert advice == f"  resume with: rollwire train --resume {run_dir(world)}"
    assert state(world) == "failed"


async def test_a_run_that_never_began_says_that_its_directory_is_gone(world: Any, rollwire: Rollwire) -> None:
    process = await rollwire("train", write_config(world), "rollout.max_episode_tokens=9999")
    status, output, errors = await finish(process)
    assert status == 1 and "rollout.max_episode_tokens is 9999, but" in errors
    assert output.splitlines()[0].startswith("run directory  ")
    assert output.splitlines()[-1] == "the run directory was removed: the run ended before it recorded anything"
    assert not (world.directory / "out" / "runs").exists()


async def test_a_port_in_use_is_told_before_anything_is_started(world: Any, rollwire: Rollwire) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = f"coordinator.port={other.getsockname()[1]}"
        status, output, errors = await finish(await rollwire("train", write_config(world), port))
    assert (status, output) == (1, "") and f"{port} (Address already in use)" in errors and errors.count("\n") == 1
    assert not (world.directory / "out" / "runs").exists()


async def test_a_full_disk_under_the_log_costs_lines_and_nothing_else(world: Any, rollwire: Rollwire) -> None:
    assert (await finish(await rollwire("train", write_config(world))))[0] == 0
    log = run_dir(world) / "logs" / "coordinator.log"
    log.unlink()
    log.symlink_to("/dev/full")
    status, output, errors = await finish(await rollwire("train", "--resume", run_dir(world), "run.max_steps=4"))
    assert (status, errors) == (0, "") and "step 4/4" in output
    log.unlink()
    log.mkdir()
    status, _, errors = await finish(await rollwire("train", "--resume", run_dir(world), "run.max_steps=5"))
    assert status == 1
    assert errors == f"error: {log} cannot be written: Is a directory; check space and permissions\n"


async def test_an_address_file_that_cannot_be_written_is_not_called_a_port_in_use(
    world: Any, rollwire: Rollwire
) -> None:
    assert (await finish(await rollwire("train", write_config(world))))[0] == 0
    place = run_dir(world) / "coordinator.json"
    place.with_name("coordinator.json.partial").mkdir()
    status, _, errors = await finish(await rollwire("train", "--resume", run_dir(world), "run.max_steps=4"))
    assert status == 1
    assert errors == f"error: {place} cannot be written: Is a directory; check space and permissions\n"


async def test_an_address_that_another_run_has_by_now_is_not_taken_for_this_run(world: Any, rollwire: Rollwire) -> None:
    """A coordinator that was killed leaves its address behind."""
    assert (await finish(await rollwire("train", write_config(world))))[0] == 0
    ended = run_dir(world)
    other = await rollwire("train", write_config(world, name="other", max_steps=100_000))
    await first_step(other)
    (going_on,) = (world.directory / "out" / "runs" / "other").iterdir()
    (ended / "coordinator.json").write_text((going_on / "coordinator.json").read_text())
    status, output, _ = await finish(await rollwire("status", ended))
    assert status == 0 and "finished, 3 steps committed" in output
    status, output, errors = await finish(await rollwire("stop", ended))
    assert (status, output) == (1, "")
    assert errors.startswith(f"error: no run is going on in {ended}: at its last address 127.0.0.1:")
    assert other.returncode is None
    status, output, _ = await finish(await rollwire("stop", going_on))
    assert (status, output) == (0, "stopping\n")
    assert (await finish(other))[0] == 0


async def test_settings_that_keep_a_run_from_going_on_are_not_remembered(world: Any, rollwire: Rollwire) -> None:
    assert (await finish(await rollwire("train", write_config(world))))[0] == 0
    stored = (run_dir(world) / "config.yaml").read_text()
    wrong = ("run.max_steps=4", "services.rollout=[127.0.0.1:1]", "timeouts.ready_s=0.2")
    status, _, errors = await finish(await rollwire("train", "--resume", run_dir(world), *wrong))
    assert status == 1 and "not ready after timeouts.ready_s=0.2 s: rollout server at 127.0.0.1:1" in errors
    assert (run_dir(world) / "config.yaml").read_text() == stored
    status, output, errors = await finish(await rollwire("train", "--resume", run_dir(world), "run.max_steps=4"))
    assert (status, errors) == (0, "") and "step 4/4" in output
