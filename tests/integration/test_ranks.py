"""Ranks as processes: how they start, and that one that fails ends them all with one clear error."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollwire.client.learner import LearnerClient
from rollwire.rpc.errors import RollwireError
from rollwire.serving.model_tensors import held_digest
from rollwire.v1 import learner_pb2

from .conftest import EXAMPLE, ROOT, command, environment, finished_run

FAILING = ROOT / "tests" / "support" / "failing_rank.py"
ENDS_WITHIN_S = 30.0
"""Failures are noticed within seconds; the rest is for a machine that does much else."""


class Learner:
    """A learner of several ranks under test."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], ready: Path, log: Path) -> None:
        self.processes = processes
        self._ready = ready
        self._log = log

    def log(self) -> str:
        return self._log.read_text()

    def address(self) -> str:
        deadline = time.monotonic() + 90
        while not self._ready.exists():
            assert all(process.poll() is None for process in self.processes), self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)
        return str(json.loads(self._ready.read_text())["address"])

    def rank_pids(self) -> list[int]:
        """Process ids of the other ranks that rank 0 has started."""
        children = Path(f"/proc/{self.processes[0].pid}/task/{self.processes[0].pid}/children").read_text()
        return [int(pid) for pid in children.split()]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Learner]]:
    """Returns what starts processes that write to one log; none outlives the test."""
    made: list[subprocess.Popen[bytes]] = []

    def run(*commands: list[str], variables: list[dict[str, str]] | None = None) -> Learner:
        with (tmp_path / "log").open("wb") as log:
            for own, arguments in zip(variables or [{}], commands, strict=True):
                made.append(
                    subprocess.Popen(
                        arguments, stdout=log, stderr=log, env={**environment(), **own}, start_new_session=True
                    )
                )
        return Learner(made, tmp_path / "ready.json", tmp_path / "log")

    yield run
    for process in made:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        process.wait()


def _serve(tmp_path: Path, *overrides: str) -> list[str]:
    settings = [f"run.output_dir={tmp_path}", "learner.micro_batch_tokens=64", *overrides]
    return ["serve", "learner", str(EXAMPLE), *settings, f"--ready-file={tmp_path / 'ready.json'}"]


def _samples(count: int, length: int) -> list[learner_pb2.TrainSample]:
    random = np.random.default_rng(0)
    return [
        learner_pb2.TrainSample(
            sample_id=f"sample-{number}",
            token_ids=random.integers(0, 256, length).tolist(),
            loss_mask=[False] + [True] * (length - 1),
            advantages=random.normal(size=length).tolist(),
            logprobs=[-1.0] * length,
        )
        for number in range(count)
    ]


async def _train(address: str, samples: list[learner_pb2.TrainSample]) -> learner_pb2.TrainResponse:
    async with LearnerClient(address) as client:
        await client.wait_ready(60)
        version = (await client.get_info()).version
        header = learner_pb2.TrainHeader(base_version=version, optimizer_steps=1)
        header.fence.run_id, header.fence.epoch = "test", 1
        header.loss.clip_low = header.loss.clip_high = 0.2
        return await client.train(header, samples, timeout_s=100)


async def test_torchrun_starts_the_ranks(start: Callable[..., Learner], tmp_path: Path) -> None:
    rendezvous = ["--standalone", "--nproc-per-node=2", "--no-python"]
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *rendezvous,
        *command(*_serve(tmp_path, "learner.world_size=2")),
    ]
    learner = start(run)
    answer = await _train(learner.address(), _samples(4, 40))
    assert answer.version.step == 1 and answer.metrics["actor/skipped_steps"] == 0
    async with LearnerClient(learner.address()) as client:
        request = learner_pb2.ExportRequest(name="two-ranks")
        request.fence.run_id, request.fence.epoch = "test", 1
        exported = await client.export(request)
    model = AutoModelForCausalLM.from_pretrained(exported.path)
    assert held_digest(model, torch.float32) == answer.digest  # whole, and what was published
    learner.processes[0].terminate()
    learner.processes[0].wait(60)


async def test_ranks_sleep_and_wake_together(start: Callable[..., Learner], tmp_path: Path) -> None:
    learner = start(command(*_serve(tmp_path, "learner.world_size=2", "learner.sharding=zero3")))
    await _train(learner.address(), _samples(2, 20))
    sleep, wake = learner_pb2.LearnerServiceSleepRequest(), learner_pb2.LearnerServiceWakeRequest()
    for request in (sleep, wake):
        request.fence.run_id, request.fence.epoch = "test", 1
    async with LearnerClient(learner.address()) as client:
        await client.sleep(sleep)
        with pytest.raises(RollwireError) as raised:
            await _train(learner.address(), _samples(2, 20))
        assert raised.value.reason == "ASLEEP"
        await client.wake(wake)
        assert not (await client.get_info()).asleep
    assert (await _train(learner.address(), _samples(2, 20))).version.step == 2


async def _refusal(client: LearnerClient) -> str:
    """Returns why a step from a version that there never was may not begin: a step that runs comes first."""
    header = learner_pb2.TrainHeader(optimizer_steps=1, base_version={"lineage": "none", "step": 0})
    header.fence.run_id, header.fence.epoch = "test", 1
    with pytest.raises(RollwireError) as raised:
        await client.train(header, [])
    return raised.value.message


async def test_a_killed_rank_ends_the_step_and_the_learner(start: Callable[..., Learner], tmp_path: Path) -> None:
    learner = start(command(*_serve(tmp_path, "learner.world_size=2")))
    step = asyncio.create_task(_train(learner.address(), _samples(4000, 60)))
    async with asyncio.timeout(100), LearnerClient(learner.address()) as client:
        while "is being computed" not in await _refusal(client):  # thousands of passes take long
            await asyncio.sleep(0.05)
    (other,) = learner.rank_pids()
    os.kill(other, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(RollwireError) as raised:
        await step
    assert (raised.value.code.name, raised.value.reason) == ("INTERNAL", "RANK_FAILED")
    assert "rank 1 of the learner failed: its process was killed by SIGKILL" in raised.value.message
    assert await asyncio.to_thread(learner.processes[0].wait, ENDS_WITHIN_S) == 1
    assert time.monotonic() - killed < ENDS_WITHIN_S
    assert "\nerror: rank 1 of the learner failed" in learner.log()


async def test_an_error_in_a_rank_is_named_and_ends_all(start: Callable[..., Learner], tmp_path: Path) -> None:
    serve = [sys.executable, str(FAILING), *_serve(tmp_path, "learner.world_size=2")]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    learner = start(serve, serve, variables=[{**common, "RANK": "0"}, {**common, "RANK": "1"}])
    with pytest.raises(RollwireError) as raised:
        await _train(learner.address(), _samples(20, 40))
    assert raised.value.reason == "RANK_FAILED" and raised.value.metadata["rank"] == "1"
    assert "ArithmeticError: injected by the test" in raised.value.message
    for process in learner.processes:
        assert await asyncio.to_thread(process.wait, ENDS_WITHIN_S) == 1


async def test_no_rank_outlives_rank_0(start: Callable[..., Learner], tmp_path: Path) -> None:
    learner = start(command(*_serve(tmp_path, "learner.world_size=2")))
    await _train(learner.address(), _samples(2, 20))
    (other,) = learner.rank_pids()
    learner.processes[0].kill()
    deadline = time.monotonic() + ENDS_WITHIN_S
    while Path(f"/proc/{other}").exists() and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    assert not Path(f"/proc/{other}").exists()


def test_a_wrong_number_of_ranks_is_refused(tmp_path: Path) -> None:
    common = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    done = subprocess.run(
        command(*_serve(tmp_path, "learner.world_size=2")),
        env={**environment(), **common},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "1 ranks of the learner were started, but learner.world_size is 2" in done.stderr


def test_launch_trains_with_two_ranks(tmp_path: Path) -> None:
    run = finished_run(
        "launch", tmp_path / "output", "learner.world_size=2", "learner.sharding=zero3", "run.max_steps=2"
    )
    assert run.query("SELECT COUNT(*) FROM steps WHERE state = 'committed'") == [(2,)]
    log = (run.path / "logs" / "learner.log").read_text()
    assert '"ranks": 2' in log and '"rank": 1' in log


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
