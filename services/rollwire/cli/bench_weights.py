"""`rollwire bench weights`: weight updates from a publishing server to verified host memory, beside a bare TCP socket.

Server and reader are processes of their own and use what learner and rollout servers use: `WeightPublisher`, the
`FetchWeights` method behind the usual interceptors, and `WeightAssembler`. The bare socket moves the same bytes between
the same two processes into memory that was touched before. Everything is measured in turns, so that other load on the
machine meets all alike; ratios are medians over the rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer
from rich.console import Console
from rich.table import Table

from rollwire.cli import bench_weights_processes as processes
from rollwire.cli.bench_weights_model import ModelShape
from rollwire.cli.bench_weights_pause import GENERATING, Engine, Pauses, measure_pauses
from rollwire.coordinator.launcher import ALLOCATOR_ENVIRONMENT
from rollwire.serving.server import ServeError
from rollwire.v1 import weights_pb2

SHARES: Final = (0.001, 0.01, 0.05)
READERS: Final = (1, 4, 16)
LINK_BYTES_PER_S: Final = 125e6
_START_TIMEOUT_S: Final = 120.0
_COMMAND_TIMEOUT_S: Final = 600.0
_TYPICAL: Final = 0.01


@dataclass
class WeightsResult:
    """Times in seconds, one per round unless said otherwise.

    Attributes:
        model_bytes: Size of the parameters.
        raw: Bare socket into touched memory.
        raw_verified: The same with the digest made in a second thread: what a verified update can reach at best.
        full: Full update to verified memory.
        same_host: The same with the version handed over as a file.
        delta: Update by changes, by share of changed values.
        delta_bytes: What it moved, by share; messages included.
        publish: Time to publish a version, by share.
        link_full: Full update through the limited link, once.
        link_delta: Update by changes through the limited link, with 1 % of the values changed.
        readers: Time until all of several readers had the version, by their number; one measurement each.
        extra_bytes: Peak of the server's memory beyond its parameters, readers included.
        raw_cpu: CPU time of sender and receiver for one transfer over the bare socket, in seconds.
        full_cpu: The same for a full update.
        same_host_cpu: The same for a version that is handed over as a file.
        delta_cpu: The same for an update with 1 % of the values changed.
        pauses: Updates of a rollout server, by kind.
        load_average: Of the last minute, at the beginning and at the end.
    """

    model_bytes: int
    raw: list[float] = field(default_factory=list)
    raw_verified: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)
    same_host: list[float] = field(default_factory=list)
    delta: dict[str, list[float]] = field(default_factory=dict)
    delta_bytes: dict[str, list[float]] = field(default_factory=dict)
    publish: dict[str, list[float]] = field(default_factory=dict)
    link_full: list[float] = field(default_factory=list)
    link_delta: list[float] = field(default_factory=list)
    readers: dict[str, float] = field(default_factory=dict)
    extra_bytes: int = 0
    raw_cpu: list[tuple[float, float]] = field(default_factory=list)
    full_cpu: list[tuple[float, float]] = field(default_factory=list)
    same_host_cpu: list[tuple[float, float]] = field(default_factory=list)
    delta_cpu: list[tuple[float, float]] = field(default_factory=list)
    pauses: dict[str, Pauses] = field(default_factory=dict)
    load_average: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """A ratio that is aimed at."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether it was reached."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def bench_weights(
    config: Annotated[Path | None, typer.Option(help="A config.json to take sizes from; else 505 MB.")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Measurements of each kind.")] = 5,
    engine: Annotated[str, typer.Option(help="Engine whose pause is measured: transformers, vllm or none.")] = "none",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measures weight updates over gRPC, in full and as changes, beside a bare TCP socket."""
    if engine not in ("transformers", "vllm", "none"):
        raise ServeError(f"--engine is {engine!r}; allowed: transformers, vllm or none")
    shape = ModelShape() if config is None else ModelShape.read(config)
    console = Console()
    with console.status("measuring") as status:
        result = measure(shape, rounds, status.update, None if engine == "none" else cast(Engine, engine))
    console.print(_table(result))
    console.print(_readers_table(result))
    if result.pauses:
        console.print(_pauses_table(result.pauses, engine))
    console.print("load average at the beginning and the end: " + ", ".join(f"{a:.1f}" for a in result.load_average))
    for name, spent in (
        ("socket", result.raw_cpu),
        ("full", result.full_cpu),
        ("same host", result.same_host_cpu),
        ("1.0% changed", result.delta_cpu),
    ):
        sender, receiver = (statistics.median(part) for part in zip(*spent, strict=True))
        console.print(f"CPU time, {name}: sender {sender:.2f} s, receiver {receiver:.2f} s")
    found = targets(result)
    for target in found:
        sign = "≥" if target.at_least else "≤"
        verdict = "reached" if target.met else "missed"
        console.print(f"{target.name}: {target.value:.3f}, target {sign} {target.limit:g}: {verdict}")
    if json_path is not None:
        summary = {target.name: {"value": target.value, "limit": target.limit, "met": target.met} for target in found}
        json_path.write_text(json.dumps(asdict(result) | {"targets": summary}, indent=2) + "\n")


def measure(
    shape: ModelShape, rounds: int, say: Callable[[str], object], engine: Engine | None = None
) -> WeightsResult:
    """Starts the processes and measures; with an engine also how long updates keep it from generating."""
    result = WeightsResult(sum(layout.byte_size for layout in shape.layouts().values()))
    result.load_average.append(os.getloadavg()[0])
    with ExitStack() as stack:
        server = stack.enter_context(_process(processes.serve, shape, 0))
        reader = stack.enter_context(_process(processes.read, shape))
        address, raw_port = server.started
        link = stack.enter_context(_process(processes.throttle, address, LINK_BYTES_PER_S))
        run = _Run(server, reader, result)
        run.publish(0.0)
        for _ in range(3):  # touches all memory
            run.fetch("full", address)
            run.publish(_TYPICAL)
            run.fetch("delta", address)
        for round_ in range(rounds):
            say(f"round {round_ + 1} of {rounds}")
            run.cpu_s()
            result.raw.append(reader.call("raw", raw_port, False))
            result.raw_cpu.append(run.cpu_s())
            result.raw_verified.append(reader.call("raw", raw_port, True))
            run.cpu_s()
            result.full.append(run.fetch("full", address)["seconds"])
            result.full_cpu.append(run.cpu_s())
            result.same_host.append(run.fetch("same_host", address)["seconds"])
            result.same_host_cpu.append(run.cpu_s())
            for share in SHARES:
                run.publish(share, record=True)
                run.cpu_s()
                fetched = run.fetch("delta", address)
                if share == _TYPICAL:
                    result.delta_cpu.append(run.cpu_s())
                result.delta.setdefault(str(share), []).append(fetched["seconds"])
                result.delta_bytes.setdefault(str(share), []).append(fetched["bytes"])
        say("a link of 1 Gbit/s")
        result.link_full.append(run.fetch("full", link.started)["seconds"])
        for _ in range(min(rounds, 3)):
            run.publish(_TYPICAL)
            result.link_delta.append(run.fetch("delta", link.started)["seconds"])
        for readers in READERS:
            say(f"{readers} readers")
            result.readers[str(readers)] = reader.call("drain", address, readers)
        result.extra_bytes = server.call("peak_extra_bytes")
    if engine is not None:
        result.pauses = _measure_pauses(shape, engine, rounds, say)
    result.load_average.append(os.getloadavg()[0])
    return result


def _measure_pauses(shape: ModelShape, engine: Engine, rounds: int, say: Callable[[str], object]) -> dict[str, Pauses]:
    """Measures against a publisher of its own, whose weights stay ones that a model can compute with."""
    with _process(processes.serve, shape, 1) as server:
        address, _ = server.started
        steps = count()

        def publish(share: float) -> weights_pb2.WeightVersion:
            server.call("publish", share, 1.0)
            return weights_pb2.WeightVersion(lineage=processes.LINEAGE, step=next(steps))

        return asyncio.run(measure_pauses(shape, engine, rounds, publish, address, say))


def targets(result: WeightsResult) -> list[Target]:
    """Returns the ratios that are aimed at."""
    typical = str(_TYPICAL)
    size = result.model_bytes
    return [
        Target("full update, speed against the bare socket", _ratio(result.raw, result.full), 0.7, at_least=True),
        Target("1 % changed, bytes against full", statistics.median(result.delta_bytes[typical]) / size, 0.02),
        Target("1 % changed, time against full", _ratio(result.delta[typical], result.full), 0.7),
        Target(
            "1 % changed, time against full at 1 Gbit/s",
            statistics.median(result.link_delta) / statistics.median(result.link_full),
            0.08,
        ),
        Target("memory for publishing against the model", result.extra_bytes / size, 1.2),
        *(
            Target(f"pause against fetching, {kind}", _ratio(times.pause, times.fetch), 0.05)
            for kind, times in result.pauses.items()
            if kind != GENERATING  # there it depends on how long a pass takes
        ),
    ]


def _ratio(upper: list[float], lower: list[float]) -> float:
    """Returns the median of the rounds' ratios."""
    return statistics.median(above / below for above, below in zip(upper, lower, strict=True))


class _Process:
    """A child process that answers commands."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.started: Any = self._receive(_START_TIMEOUT_S)

    def call(self, name: str, *arguments: object) -> Any:
        """Carries out a command and returns its answer."""
        self._pipe.send((name, *arguments))
        return self._receive(_COMMAND_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"a process of the benchmark gave no answer within {timeout_s:g} s")
        return self._pipe.recv()


@contextmanager
def _process(target: Callable[..., None], *arguments: object) -> Iterator[_Process]:
    """Runs a function in a fresh process, with the memory settings that servers are started with."""
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=target, args=(there, *arguments), daemon=True)
    before = dict(os.environ)
    os.environ.update(ALLOCATOR_ENVIRONMENT)
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    there.close()
    try:
        yield _Process(here)
    finally:
        here.close()  # the process ends when it sees this
        process.join(10)
        process.kill()


class _Run:
    """Keeps server and reader at the same version."""

    def __init__(self, server: _Process, reader: _Process, result: WeightsResult) -> None:
        self._server = server
        self._reader = reader
        self._result = result
        self._step = -1
        self._cpu_s = (0.0, 0.0)

    def cpu_s(self) -> tuple[float, float]:
        """Returns the CPU time of server and reader since the last call."""
        now = (self._server.call("cpu_s"), self._reader.call("cpu_s"))
        spent = (now[0] - self._cpu_s[0], now[1] - self._cpu_s[1])
        self._cpu_s = now
        return spent

    def publish(self, share: float, *, record: bool = False) -> None:
        """Changes a share of the values and publishes the next version."""
        answer = self._server.call("publish", share)
        self._step += 1
        if record:
            self._result.publish.setdefault(str(share), []).append(answer["seconds"])

    def fetch(self, kind: str, address: str) -> dict[str, float]:
        """Fetches the present version."""
        self._reader.call("expect", self._step)
        answer: dict[str, float] = self._reader.call(kind, address)
        return answer


def _table(result: WeightsResult) -> Table:
    table = Table(title=f"{result.model_bytes / 1e6:,.0f} MB of bfloat16: medians, ranges", title_justify="left")
    table.add_column("update", no_wrap=True)
    for heading in ("seconds", "speed", "bytes", "publishing"):
        table.add_column(heading, justify="right", no_wrap=True)

    def row(name: str, seconds: list[float], moved: float | None = None, publish: list[float] | None = None) -> None:
        times = f"{statistics.median(seconds):.3f} ({min(seconds):.2f}-{max(seconds):.2f})"
        speed = f"{_ratio(result.raw, seconds):.2f}" if len(seconds) == len(result.raw) else ""
        bytes_moved = f"{(result.model_bytes if moved is None else moved) / result.model_bytes:.2%}"
        table.add_row(name, times, speed, bytes_moved, f"{statistics.median(publish):.3f}" if publish else "")

    row("bare socket", result.raw)
    row("socket and digest", result.raw_verified)
    row("full", result.full)
    row("full, same host", result.same_host, 0)
    for share, seconds in result.delta.items():
        moved = statistics.median(result.delta_bytes[share])
        row(f"{float(share):.1%} changed", seconds, moved, result.publish[share])
    row("full, 1 Gbit/s", result.link_full)
    row("1.0%, 1 Gbit/s", result.link_delta, statistics.median(result.delta_bytes[str(_TYPICAL)]))
    return table


def _pauses_table(pauses: dict[str, Pauses], engine: str) -> Table:
    table = Table(title=f"updates of a rollout server with {engine}: medians, ranges", title_justify="left")
    table.add_column("update", no_wrap=True)
    for heading in ("fetching, ms", "pause, ms", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for kind, times in pauses.items():
        fetch, pause = ([1e3 * seconds for seconds in part] for part in (times.fetch, times.pause))
        table.add_row(
            kind,
            f"{statistics.median(fetch):.0f} ({min(fetch):.0f}-{max(fetch):.0f})",
            f"{statistics.median(pause):.1f} ({min(pause):.1f}-{max(pause):.1f})",
            f"{_ratio(times.pause, times.fetch):.3f}",
        )
    return table


def _readers_table(result: WeightsResult) -> Table:
    table = Table(title="readers of one version at once", title_justify="left")
    for heading in ("readers", "all done after", "GB/s together"):
        table.add_column(heading, justify="right")
    for readers, seconds in result.readers.items():
        table.add_row(readers, f"{seconds:.2f} s", f"{int(readers) * result.model_bytes / seconds / 1e9:.2f}")
    return table
