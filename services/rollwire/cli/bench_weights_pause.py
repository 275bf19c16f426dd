"""How long an update keeps a rollout server from generating: the last part of `rollwire bench weights`.

The server is the process that `rollwire launch` starts. It follows the benchmark's publisher over the network, idle and
while it generates.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

from rollwire.cli.bench_weights_model import ModelShape
from rollwire.client.rollout import RolloutClient
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.launcher import LocalLauncher
from rollwire.coordinator.run_dir import create_run_dir
from rollwire.policies import resolve
from rollwire.rpc.ids import new_id
from rollwire.serving.config import RunConfig
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2

Engine = Literal["transformers", "vllm"]
FULL, CHANGED, GENERATING = "full", "1 % changed", "1 % changed, generating"

_ALL: Final = 1.0
_TYPICAL: Final = 0.01
_WARMUP_UPDATES: Final = 3  # two buffers and a second set of weights are touched for the first time
_GENERATIONS: Final = 4
_READY_S: Final = 300.0
_UPDATE_S: Final = 120.0
_POLL_S: Final = 0.01


@dataclass
class Pauses:
    """Updates of one kind, in seconds, one entry per round.

    Attributes:
        fetch: From the request to verified host memory.
        pause: Time during which no generation was admitted.
    """

    fetch: list[float] = field(default_factory=list)
    pause: list[float] = field(default_factory=list)

    def add(self, answer: rollout_pb2.UpdateWeightsResponse) -> None:
        """Adds an update."""
        self.fetch.append(answer.fetch_duration.ToTimedelta().total_seconds())
        self.pause.append(answer.pause_duration.ToTimedelta().total_seconds())


async def measure_pauses(
    shape: ModelShape,
    engine: Engine,
    rounds: int,
    publish: Callable[[float], weights_pb2.WeightVersion],
    source: str,
    say: Callable[[str], object],
) -> dict[str, Pauses]:
    """Starts a rollout server and updates it.

    Args:
        shape: The model that `publish` publishes.
        engine: `rollout.engine`.
        rounds: Updates of each kind.
        publish: Changes a share of the values, publishes them and returns the version.
        source: Where the server fetches from.
        say: Told what is being done.

    Raises:
        RunError: The server does not start.
    """
    found = {kind: Pauses() for kind in (FULL, CHANGED, GENERATING)}
    say(f"starting a rollout server with {engine}")
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), shape)
        async with _server(_config(Path(directory), engine), source) as server:
            for _ in range(_WARMUP_UPDATES):
                await server.update(await asyncio.to_thread(publish, _TYPICAL))
            for number in range(rounds):
                say(f"pauses: round {number + 1} of {rounds}")
                found[FULL].add(await server.update(await asyncio.to_thread(publish, _ALL)))
                found[CHANGED].add(await server.update(await asyncio.to_thread(publish, _TYPICAL)))
                version = await asyncio.to_thread(publish, _TYPICAL)
                async with server.generating():
                    found[GENERATING].add(await server.update(version, rollout_pb2.PAUSE_MODE_KEEP))
    return found


def write_model(directory: Path, shape: ModelShape) -> None:
    """Writes a model directory with these sizes in bfloat16, random weights and the tokenizer of `builtin:tiny`."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    source = Path(resolve("builtin:tiny"))
    ends = json.loads((source / "generation_config.json").read_text()).get("eos_token_id")
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        vocab_size=shape.vocab_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        tie_word_embeddings=shape.tie_word_embeddings,
        max_position_embeddings=4096,
        eos_token_id=ends,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, directory / name)


def _config(directory: Path, engine: Engine) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "bench-weights", "output_dir": str(directory / "output")},
            "model": {"path": str(directory), "dtype": "bfloat16"},
            "rollout": {
                "engine": engine,
                "same_host_weights": False,
                "max_episode_tokens": 1024,
                "max_concurrent_sequences": 2 * _GENERATIONS,
            },
            "environments": [{"tag": "FrozenLake"}],
        }
    )


class _Server:
    """A rollout server that follows a source."""

    def __init__(self, client: RolloutClient, source: str) -> None:
        self._client = client
        self._source = weights_pb2.WeightSource(target=source)
        self._fence = trajectory_pb2.Fence(run_id=new_id("bench"), epoch=1)

    async def update(
        self,
        version: weights_pb2.WeightVersion,
        mode: rollout_pb2.PauseMode.ValueType = rollout_pb2.PAUSE_MODE_WAIT,
    ) -> rollout_pb2.UpdateWeightsResponse:
        """Activates a version."""
        request = rollout_pb2.UpdateWeightsRequest(
            fence=self._fence, version=version, source=self._source, pause_mode=mode
        )
        return await self._client.update_weights(request, timeout_s=_UPDATE_S)

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Generates as long as the context lasts; it begins when all generations have drawn tokens."""
        drawn = [asyncio.Event() for _ in range(_GENERATIONS)]

        async def generate(number: int) -> None:
            request = rollout_pb2.GenerateRequest(
                token_ids=[number + 1],
                seed=number,
                sampling=trajectory_pb2.SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=900),
            )
            async for _ in self._client.generate(request, timeout_s=_UPDATE_S):
                drawn[number].set()

        tasks = [asyncio.create_task(generate(number)) for number in range(_GENERATIONS)]
        try:
            async with asyncio.timeout(_UPDATE_S):
                while not all(event.is_set() for event in drawn):
                    for task in tasks:
                        if task.done():
                            task.result()  # says why it has ended
                    await asyncio.sleep(_POLL_S)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _server(config: RunConfig, source: str) -> AsyncIterator[_Server]:
    """Starts a rollout server and ends it afterwards."""
    launcher = LocalLauncher(config, create_run_dir(config, datetime.now().astimezone()), kinds=("rollout",))
    try:
        services = await launcher.start()
        async with RolloutClient(services.rollout[0]) as client:
            watching = asyncio.create_task(launcher.watch())
            ready = asyncio.create_task(client.wait_ready(_READY_S))
            try:
                await asyncio.wait([ready, watching], return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    await watching  # says what has ended
                if not await ready:
                    raise RunError(f"the rollout server was not ready within {_READY_S:g} s")
                yield _Server(client, source)
            finally:
                for task in (ready, watching):
                    task.cancel()
                await asyncio.gather(ready, watching, return_exceptions=True)
    finally:
        await launcher.stop()
