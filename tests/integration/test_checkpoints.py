"""Checkpoints of real learners, one rank and two: killed with SIGKILL and started again."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from rollwire.client.learner import LearnerClient
from rollwire.rpc.errors import RollwireError
from rollwire.v1 import learner_pb2, trajectory_pb2

from .conftest import EXAMPLE, command, environment

FENCE = trajectory_pb2.Fence(run_id="run", epoch=1)
MANY = 20_000
"""Samples of a step that cannot end before the test kills the learner."""


class Learner:
    """A learner in processes of its own, and a client of it."""

    def __init__(self, client: LearnerClient, process: subprocess.Popen[bytes], root: Path) -> None:
        self.client = client
        self.process = process
        self._root = root

    async def train(self, seed: int, number: int = 4) -> bytes:
        header = learner_pb2.TrainHeader(
            base_version=(await self.client.get_info()).version, optimizer_steps=2, shuffle_seed=seed, fence=FENCE
        )
        header.loss.clip_low = header.loss.clip_high = 0.2
        return (await self.client.train(header, samples(seed, number), timeout_s=100)).digest

    async def save(self, name: str) -> Path:
        request = learner_pb2.SaveCheckpointRequest(fence=FENCE, name=name)
        return Path((await self.client.save_checkpoint(request, timeout_s=100)).path)

    async def load(self, name: str) -> learner_pb2.LoadCheckpointResponse:
        request = learner_pb2.LoadCheckpointRequest(fence=FENCE, name=name)
        return await self.client.load_checkpoint(request, timeout_s=100)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@asynccontextmanager
async def learner(root: Path, world_size: int) -> AsyncIterator[Learner]:
    ready = root / "ready.json"
    ready.unlink(missing_ok=True)
    settings = [
        f"run.output_dir={root}",
        "run.deterministic=true",
        "max_staleness=0",
        f"learner.world_size={world_size}",
        "learner.sharding=zero3",
        "learner.optimizer.learning_rate=1e-3",
    ]
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            command("serve", "learner", EXAMPLE, *settings, f"--ready-file={ready}"),
            stdout=log,
            stderr=log,
            env=environment(),
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 120
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline, (root / "log").read_text()
            await asyncio.sleep(0.05)
        async with LearnerClient(json.loads(ready.read_text())["address"]) as client:
            await client.wait_ready(60)
            yield Learner(client, process, root)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def samples(seed: int, number: int = 4) -> list[learner_pb2.TrainSample]:
    random = np.random.default_rng(seed)
    return [
        learner_pb2.TrainSample(
            sample_id=f"sample-{index}",
            token_ids=random.integers(0, 256, 24).tolist(),
            loss_mask=[False] + [True] * 23,
            advantages=random.normal(size=24).tolist(),
            logprobs=[-1.0] * 24,
        )
        for index in range(number)
    ]


def shards(checkpoint: Path) -> dict[str, dict[str, str]]:
    """SHA-256 of every piece of weights and optimizer, by file; the order of a file's header is not fixed."""
    found: dict[str, dict[str, str]] = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "np") as shard:
            names = list(shard.keys())
            found[file.name] = {name: hashlib.sha256(shard.get_tensor(name).tobytes()).hexdigest() for name in names}
    return found


def tensors(checkpoint: Path) -> dict[str, bytes]:
    """The whole tensors of a checkpoint, put together from their shards."""
    specs = json.loads((checkpoint / "state.json").read_text())["tensors"]
    whole = {name: np.full(shape, np.nan, np.float32) for name, (dtype, shape) in specs.items()}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "np") as shard:
            places = json.loads(shard.metadata()["DCP_SHARDING_INFO"])
            for name in shard.keys():  # noqa: SIM118 - this is no dictionary
                piece = shard.get_tensor(name)
                begin = places[name]["saved_offsets"]
                whole[name][tuple(slice(b, b + n) for b, n in zip(begin, piece.shape, strict=True))] = piece
    return {name: tensor.tobytes() for name, tensor in whole.items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learner")


@pytest.mark.parametrize("world_size", [1, 2])
async def test_six_steps_are_three_a_kill_and_three(root: Path, world_size: int) -> None:
    """I7: the same SHA-256 of weights and optimizer, whatever the learner that was killed had done since."""
    name = f"ranks-{world_size}"
    async with learner(root, world_size) as first:
        for seed in (1, 2, 3):
            await first.train(seed)
        await first.save(f"{name}-three")
        expected = [await first.train(seed) for seed in (4, 5, 6)]
        six = await first.save(f"{name}-six")
        running = asyncio.create_task(first.train(7, MANY))
        await asyncio.sleep(0.5)
        first.kill()
        with suppress(RollwireError):  # on a fast machine it was done by then, which must not matter either
            await running
    async with learner(root, world_size) as second:
        assert (await second.load(f"{name}-three")).version.step == 3
        assert [await second.train(seed) for seed in (4, 5, 6)] == expected
        again = await second.save(f"{name}-six-again")
    assert shards(again) == shards(six)
    assert len(shards(six)) == world_size


async def test_another_number_of_ranks_loads_the_same_state(root: Path) -> None:
    """Needs what the tests before saved."""
    found = {}
    for world_size, other in ((1, 2), (2, 1)):
        async with learner(root, world_size) as loading:
            await loading.load(f"ranks-{other}-six")
            found[other] = tensors(await loading.save(f"from-{other}"))
            await loading.train(9)
    for other in (1, 2):
        expected = tensors(root / "checkpoints" / f"ranks-{other}-six")
        assert found[other] == expected
        assert any(name.endswith(".exp_avg_sq") for name in expected)


async def test_damage_of_one_ranks_shard_is_named_and_changes_nothing(root: Path, tmp_path: Path) -> None:
    async with learner(tmp_path, 2) as sharded:
        path = await sharded.save("zero")
        digest = await sharded.train(1)
        shard = sorted(path.glob("*.safetensors"))[1]
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        with pytest.raises(RollwireError, match=f"checkpoint zero is damaged: {shard.name} was changed"):
            await sharded.load("zero")
        shard.unlink()
        with pytest.raises(RollwireError, match=f"checkpoint zero is damaged: {shard.name} is missing") as raised:
            await sharded.load("zero")
        assert raised.value.reason == "CHECKPOINT_CORRUPT"
        zero = await sharded.save("whole")
        (zero / "state.json").write_bytes((zero / "state.json").read_bytes()[:-9])  # one rank compares it, all read it
        with pytest.raises(RollwireError, match=r"checkpoint whole is damaged: state\.json has") as raised:
            await sharded.load("whole")
        assert raised.value.reason == "CHECKPOINT_CORRUPT"
        assert (await sharded.client.get_info()).digest == digest
        await sharded.train(2)


async def test_a_kill_while_saving_leaves_the_ones_before(tmp_path: Path) -> None:
    async with learner(tmp_path, 1) as saving:
        digest = (await saving.client.get_info()).digest

        async def save_on() -> None:
            for number in range(10_000):
                await saving.save(f"n{number:05d}")

        running = asyncio.create_task(save_on())
        while len(list((tmp_path / "checkpoints").glob("n*"))) < 5:
            await asyncio.sleep(0.05)
        saving.kill()
        with pytest.raises(RollwireError):
            await running
    async with learner(tmp_path, 1) as second:
        names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert names == [f"n{number:05d}" for number in range(len(names))] and len(names) > 2
        for name in (names[0], names[-1]):
            assert (await second.load(name)).digest == digest
