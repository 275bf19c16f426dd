"""`rollwire bench ranks`: training steps of a learner of several ranks beside one of a single rank, each rank one core.

Both learners are real servers with the same model and take the same batches in turns, so that other load on the machine
meets both alike. Lengths are skewed, as those of episodes are: most samples short, some long.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from rollwire.cli.bench_process import tree_cpu_s
from rollwire.client.learner import LearnerClient
from rollwire.coordinator.launcher import ALLOCATOR_ENVIRONMENT
from rollwire.serving.server import ServeError
from rollwire.v1 import learner_pb2, trajectory_pb2

_START_TIMEOUT_S: Final = 300.0
_STOP_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.1
_LONGEST_TOKENS: Final = 1024
_FENCE: Final = trajectory_pb2.Fence(run_id="bench-ranks", epoch=1)


@dataclass
class RanksResult:
    """Per round, the first one left out.

    Attributes:
        parameters: Number of parameters of the model.
        tokens: Tokens of a batch.
        seconds: Time of a step without publishing, by number of ranks.
        cpu_seconds: CPU time of all ranks together for a step with publishing, by number of ranks.
        load_average: Of the last minute, at the beginning and at the end.
    """

    parameters: int
    tokens: int
    seconds: dict[int, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[int, list[float]] = field(default_factory=dict)
    load_average: list[float] = field(default_factory=list)

    def speedup(self, ranks: int) -> float:
        """Returns how many times faster so many ranks are than one: the median over the rounds."""
        return statistics.median(one / many for one, many in zip(self.seconds[1], self.seconds[ranks], strict=True))


def bench_ranks(
    world_size: Annotated[int, typer.Option(min=2, help="Ranks to compare with one.")] = 2,
    hidden_size: Annotated[int, typer.Option(min=64, help="Width of the model, a multiple of 64.")] = 512,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 12,
    vocabulary: Annotated[int, typer.Option(min=256, help="Tokens that the model knows.")] = 100_000,
    samples: Annotated[int, typer.Option(min=1, help="Samples of a batch.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Measured steps of each learner.")] = 3,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Configuration of both, as key=value.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Training steps of several ranks beside one rank, each with one core."""
    with tempfile.TemporaryDirectory(prefix="rollwire-bench-") as scratch, ExitStack() as stack:
        directory = Path(scratch)
        _make_model(directory / "model", hidden_size, layers, vocabulary)
        servers = {
            size: stack.enter_context(learner_server(directory, size, overrides or [])) for size in (1, world_size)
        }
        result = asyncio.run(_measure(servers, samples, rounds, vocabulary))
    if as_json:
        print(json.dumps({**vars(result), "speedup": result.speedup(world_size)}))
    else:
        _show(result, world_size)


@dataclass(frozen=True)
class RunningLearner:
    """A learner's server.

    Attributes:
        address: Where it listens.
        pid: Of rank 0.
    """

    address: str
    pid: int


def _make_model(directory: Path, hidden_size: int, layers: int, vocabulary: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        max_position_embeddings=2 * _LONGEST_TOKENS,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


@contextmanager
def learner_server(directory: Path, size: int, overrides: list[str]) -> Iterator[RunningLearner]:
    """Serves a learner of so many ranks, of the model in `directory`/model.

    Raises:
        ServeError: It does not start.
    """
    ready = directory / f"learner-{size}.json"
    command = [sys.executable, "-P", "-m", "rollwire.cli.main", "serve", "learner", f"model.path={directory / 'model'}"]
    settings = [
        "device=cpu",
        f"run.output_dir={directory / str(size)}",
        f"learner.world_size={size}",
        "learner.micro_batch_tokens=2048",
        "learner.torch_threads=1",
        *overrides,
    ]
    log = directory / f"learner-{size}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - this very program
            [*command, *settings, f"--ready-file={ready}", f"--parent-pid={os.getpid()}"],
            stdout=output,
            stderr=output,
            env={**os.environ, **ALLOCATOR_ENVIRONMENT, "OMP_NUM_THREADS": "1"},
        )
    try:
        end = time.monotonic() + _START_TIMEOUT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise ServeError(f"the learner of {size} ranks did not start: {log.read_text()[-1000:]}")
            time.sleep(_POLL_S)
        yield RunningLearner(json.loads(ready.read_text())["address"], process.pid)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _measure(servers: dict[int, RunningLearner], samples: int, rounds: int, vocabulary: int) -> RanksResult:
    """Trains both learners in turns."""
    clients = {size: LearnerClient(server.address) for size, server in servers.items()}
    result: RanksResult | None = None
    load_before = os.getloadavg()[0]
    for number in range(rounds + 1):
        batch = _batch(number, samples, vocabulary)
        for size, client in clients.items():
            await client.wait_ready(_START_TIMEOUT_S)
            info = await client.get_info()
            header = learner_pb2.TrainHeader(base_version=info.version, optimizer_steps=1, fence=_FENCE)
            header.loss.clip_low = header.loss.clip_high = 0.2
            before = sum(tree_cpu_s(servers[size].pid))
            answer = await client.train(header, batch)
            spent = sum(tree_cpu_s(servers[size].pid)) - before
            if result is None:
                result = RanksResult(info.parameters, int(answer.metrics["actor_train/tokens"]))
            if number > 0:  # the first step creates the moments
                result.seconds.setdefault(size, []).append(answer.metrics["time/actor_train/train_step/total"])
                result.cpu_seconds.setdefault(size, []).append(spent)
    for client in clients.values():
        await client.close()
    assert result is not None
    result.load_average = [load_before, os.getloadavg()[0]]
    return result


def _batch(seed: int, samples: int, vocabulary: int) -> list[learner_pb2.TrainSample]:
    """Draws a batch; lengths are the same in every round."""
    lengths = np.random.default_rng(0).lognormal(5.0, 0.8, samples).clip(16, _LONGEST_TOKENS).astype(int)
    random = np.random.default_rng(seed)
    return [
        learner_pb2.TrainSample(
            sample_id=f"sample-{number}",
            token_ids=random.integers(0, vocabulary, length).tolist(),
            loss_mask=(np.arange(length) >= length // 2).tolist(),
            advantages=random.normal(size=length).tolist(),
            logprobs=[-float(np.log(vocabulary))] * int(length),
        )
        for number, length in enumerate(lengths)
    ]


def _show(result: RanksResult, world_size: int) -> None:
    table = Table(title=f"{result.parameters / 1e6:.0f} M parameters, {result.tokens} tokens a step")
    for name in ("ranks", "seconds a step", "tokens/s", "CPU seconds a step"):
        table.add_column(name, justify="right")
    for size in (1, world_size):
        seconds = statistics.median(result.seconds[size])
        cpu = statistics.median(result.cpu_seconds[size])
        table.add_row(str(size), f"{seconds:.2f}", f"{result.tokens / seconds:.0f}", f"{cpu:.2f}")
    console = Console()
    console.print(table)
    console.print(
        f"{world_size} ranks are {result.speedup(world_size):.2f} times as fast as one (median of the rounds)"
    )
    console.print(f"load average {result.load_average[0]:.1f} before, {result.load_average[1]:.1f} after")
