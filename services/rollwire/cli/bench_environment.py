"""`rollwire bench environment`: turns of FrozenLake per second over gRPC, beside a bare unary echo.

Both servers run in processes of their own and are called by the same client, with the same stub and channel options, in
alternating windows of the same run: what differs is only what the server does. The echo has no interceptor, no
session and no game; it answers with the text that it got.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Final

import grpc
import grpc.aio
import typer
from rich.console import Console
from rich.table import Table

from rollwire.client.environment import EnvironmentClient
from rollwire.environment.service import EnvironmentServer
from rollwire.rpc.ids import new_id
from rollwire.rpc.limits import ENVIRONMENT_MESSAGE_BYTES, MAX_CONCURRENT_RPCS, server_options
from rollwire.serving.config import ConfigError, RunConfig
from rollwire.serving.logs import configure_logging
from rollwire.serving.server import Binding, ServeError, serving
from rollwire.v1 import environment_pb2 as pb

TARGET_RATIO: Final = 0.8
_START_TIMEOUT_S: Final = 60.0
_ENDLESS_TURNS: Final = 10**9
# As long as the reply of a turn on a 4x4 lake: 128 bytes with its observation and metrics.
_ECHO_TEXT: Final = "<answer>Right</answer>".ljust(128, ".")
_MOVES: Final = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
_BACK: Final = {"Left": "Right", "Right": "Left", "Up": "Down", "Down": "Up"}

Call = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Window:
    """One measured window.

    Attributes:
        calls_per_s: Answered calls per second.
        server_cpu_us: CPU time of the server per call, in microseconds.
    """

    calls_per_s: float
    server_cpu_us: float


@dataclass(frozen=True)
class BenchResult:
    """Windows of both servers, in pairs; `ratio` is the median over the pairs."""

    sessions: int
    seconds: float
    echo: list[Window]
    steps: list[Window]
    ratio: float
    target_ratio: float = TARGET_RATIO


def bench_environment(
    sessions: Annotated[int, typer.Option(min=1, max=1000, help="Sessions that play at once.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Length of one window.")] = 0.5,
    repetitions: Annotated[int, typer.Option(min=1, max=1000, help="Windows of each kind.")] = 30,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measures turns of FrozenLake per second over gRPC, beside a bare unary echo."""
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ConfigError(f"--json is {json_path}: its directory does not exist")
    console = Console()
    with console.status("measuring"):
        result = asyncio.run(measure(sessions, seconds, repetitions))
    console.print(_table(result))
    verdict = "reached" if result.ratio >= TARGET_RATIO else "missed"
    console.print(f"ratio {result.ratio:.2f} (median of {repetitions} pairs); target {TARGET_RATIO:g}: {verdict}")
    if json_path is not None:
        json_path.write_text(json.dumps(asdict(result), indent=2) + "\n")


async def measure(sessions: int, seconds: float, repetitions: int) -> BenchResult:
    """Starts both servers and measures them in alternating windows."""
    echo: list[Window] = []
    steps: list[Window] = []
    async with AsyncExitStack() as stack:
        echo_client, echo_cpu = await stack.enter_async_context(_server(_serve_echo))
        lake_client, lake_cpu = await stack.enter_async_context(_server(_serve_environment))
        echo_calls = [_echo_call(echo_client) for _ in range(sessions)]
        lake_calls = await asyncio.gather(*(_lake_call(lake_client, number) for number in range(sessions)))
        for calls, cpu in ((echo_calls, echo_cpu), (lake_calls, lake_cpu)):
            await _window(calls, cpu, min(seconds, 1.0))  # warm-up
        for repetition in range(repetitions):
            order = [(echo, echo_calls, echo_cpu), (steps, lake_calls, lake_cpu)]
            for windows, calls, cpu in order if repetition % 2 == 0 else reversed(order):
                windows.append(await _window(calls, cpu, seconds))
    ratio = statistics.median(lake.calls_per_s / bare.calls_per_s for lake, bare in zip(steps, echo, strict=True))
    return BenchResult(sessions, seconds, echo, steps, ratio)


async def _window(calls: list[Call], server_cpu_s: Callable[[], float], seconds: float) -> Window:
    """Repeats every call for `seconds`, all of them concurrently."""
    answered = 0
    cpu_before, start = server_cpu_s(), time.perf_counter()
    end = start + seconds

    async def repeat(call: Call) -> None:
        nonlocal answered
        while time.perf_counter() < end:
            await call()
            answered += 1

    await asyncio.gather(*map(repeat, calls))
    elapsed = time.perf_counter() - start
    return Window(answered / elapsed, (server_cpu_s() - cpu_before) / answered * 1e6)


def _echo_call(client: EnvironmentClient) -> Call:
    session_id = "0" * 32
    return lambda: client.step(session_id, 0, _ECHO_TEXT)


async def _lake_call(client: EnvironmentClient, number: int) -> Call:
    """Opens a session whose player walks to and fro between two firm cells, so that the episode never ends."""
    seed = number * 1000
    while True:
        options = {"max_steps": _ENDLESS_TURNS}
        request = pb.OpenSessionRequest(request_id=new_id("bench"), environment_tag="FrozenLake", seed=seed)
        request.options.update(options)
        opened = await client.open_session(request)
        walk = _walk(opened.observation)
        if walk is not None:
            break
        await client.close_session(opened.session_id)
        seed += 1
    turn = 0

    async def step() -> None:
        nonlocal turn
        response = await client.step(opened.session_id, turn, walk[turn % 2])
        if response.HasField("failure") or response.terminated or response.truncated:
            raise RuntimeError(f"the walk of session {number} ended: {response}")
        turn += 1

    return step


def _walk(observation: str) -> tuple[str, str] | None:
    """Returns two opposite moves between the player's cell and an empty neighbour, if there is one."""
    rows = observation.splitlines()
    row = next(index for index, line in enumerate(rows) if "P" in line)
    column = rows[row].index("P")
    for name, (down, right) in _MOVES.items():
        there = (row + down, column + right)
        if 0 <= there[0] < len(rows) and 0 <= there[1] < len(rows[0]) and rows[there[0]][there[1]] == "_":
            return f"<answer>{name}</answer>", f"<answer>{_BACK[name]}</answer>"
    return None


@asynccontextmanager
async def _server(
    serve: Callable[[Connection], None],
) -> AsyncIterator[tuple[EnvironmentClient, Callable[[], float]]]:
    """Runs a server process; gives a client of it and a function for its CPU time in seconds."""
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()
    try:
        address = _await_address(here)

        def cpu_s() -> float:
            here.send(None)
            used: float = here.recv()
            return used

        async with EnvironmentClient(address) as client:
            yield client, cpu_s
    finally:
        here.close()  # the process ends when it sees this
        process.join(10)
        process.kill()


def _await_address(pipe: Connection) -> str:
    if pipe.poll(_START_TIMEOUT_S):
        with contextlib.suppress(EOFError):
            address: str = pipe.recv()
            return address
    raise ServeError(f"a server of the benchmark did not start within {_START_TIMEOUT_S:g} s; see the messages above")


def _serve_environment(pipe: Connection) -> None:
    async def serve() -> None:
        async with serving(EnvironmentServer(RunConfig()), Binding(), grace_s=1.0) as running:
            await _report(pipe, running.address)

    configure_logging("environment", level="WARNING")
    asyncio.run(serve())


def _serve_echo(pipe: Connection) -> None:
    async def serve() -> None:
        server = grpc.aio.server(
            options=server_options(ENVIRONMENT_MESSAGE_BYTES), maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS
        )
        step = grpc.unary_unary_rpc_method_handler(
            _echo, request_deserializer=pb.StepRequest.FromString, response_serializer=pb.StepResponse.SerializeToString
        )
        handlers = grpc.method_handlers_generic_handler(EnvironmentServer.full_name, {"Step": step})
        server.add_generic_rpc_handlers((handlers,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await _report(pipe, f"127.0.0.1:{port}")
        await server.stop(1.0)

    asyncio.run(serve())


async def _echo(request: pb.StepRequest, context: object) -> pb.StepResponse:
    return pb.StepResponse(observation=request.action)


async def _report(pipe: Connection, address: str) -> None:
    """Tells the address, then the CPU time whenever asked, until the other end closes the pipe."""
    closed = asyncio.Event()

    def answer() -> None:
        try:
            pipe.recv()
            pipe.send(time.process_time())
        except (EOFError, OSError):
            closed.set()

    pipe.send(address)
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), answer)
    await closed.wait()
    loop.remove_reader(pipe.fileno())


def _table(result: BenchResult) -> Table:
    table = Table(title=f"{result.sessions} sessions, windows of {result.seconds:g} s", title_justify="left")
    for heading in ("server", "calls/s (median)", "lowest", "highest", "server CPU per call"):
        table.add_column(heading, justify="left" if heading == "server" else "right")
    for name, windows in (("bare unary echo", result.echo), ("FrozenLake Step", result.steps)):
        rates = [window.calls_per_s for window in windows]
        cpu_us = statistics.median(window.server_cpu_us for window in windows)
        table.add_row(
            name, f"{statistics.median(rates):,.0f}", f"{min(rates):,.0f}", f"{max(rates):,.0f}", f"{cpu_us:.0f} µs"
        )
    return table
