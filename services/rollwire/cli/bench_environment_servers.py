"""The server processes of `rollwire bench environment`: each tells its address, and its CPU time whenever asked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from rollwire.client.provider import serve_environment_async
from rollwire.environment.frozen_lake import FrozenLake
from rollwire.environment.service import EnvironmentServer
from rollwire.rpc.limits import ENVIRONMENT_MESSAGE_BYTES, MAX_CONCURRENT_RPCS, server_options
from rollwire.serving.config import RunConfig
from rollwire.serving.logs import configure_logging
from rollwire.serving.server import Binding, ServeError, serving
from rollwire.v1 import environment_pb2 as pb

MAX_SESSIONS: Final = 8192
HOSTED_TAG: Final = "HostedLake"
"""FrozenLake as a user's own class: what the server knows nothing about."""

PROVIDED_TAG: Final = "ProvidedLake"
_START_TIMEOUT_S: Final = 60.0
_PROC: Final = Path("/proc")


class HostedLake(FrozenLake):
    """FrozenLake, by another name."""


@dataclass(frozen=True)
class ServerProcess:
    """A process that serves.

    Attributes:
        address: `host:port`.
        pid: Its process id.
        cpu_s: Returns the CPU time that it has used, in seconds.
    """

    address: str
    pid: int
    cpu_s: Callable[[], float]

    def resident_bytes(self) -> int:
        """Returns the memory that it occupies."""
        for line in (_PROC / str(self.pid) / "status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
        raise ServeError("a server of the benchmark has ended; see the messages above")


@asynccontextmanager
async def server_process(
    serve: Callable[..., None], *arguments: object, cores: Sequence[int]
) -> AsyncIterator[ServerProcess]:
    """Runs `serve(pipe, *arguments)` in a process on the given cores."""
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_pinned, args=(serve, cores, there, *arguments), daemon=True)
    process.start()
    there.close()
    assert process.pid is not None
    try:
        address = await asyncio.to_thread(_await_address, here)

        def cpu_s() -> float:
            here.send(None)
            used: float = here.recv()
            return used

        yield ServerProcess(address, process.pid, cpu_s)
    finally:
        here.close()  # the process ends when it sees this
        await asyncio.to_thread(process.join, 10)
        process.kill()


def _pinned(serve: Callable[..., None], cores: Sequence[int], pipe: Connection, *arguments: object) -> None:
    os.sched_setaffinity(0, cores)
    configure_logging("environment", level="WARNING")
    serve(pipe, *arguments)


def _await_address(pipe: Connection) -> str:
    if pipe.poll(_START_TIMEOUT_S):
        with contextlib.suppress(EOFError):
            address: str = pipe.recv()
            return address
    raise ServeError(f"a server of the benchmark did not start within {_START_TIMEOUT_S:g} s; see the messages above")


def serve_rollwire(pipe: Connection) -> None:
    """Serves Rollwire's environment server, with FrozenLake as a built-in and as a user's environment."""
    definitions = {HOSTED_TAG: {"type": f"{__name__}:HostedLake", "isolation": "thread"}}
    section = {"max_sessions": MAX_SESSIONS, "definitions": definitions}
    config = RunConfig.model_validate({"environment": section})

    async def serve() -> None:
        async with serving(EnvironmentServer(config), Binding(), grace_s=1.0) as running:
            await _report(pipe, running.address)

    asyncio.run(serve())


def serve_provider(pipe: Connection, target: str) -> None:
    """Dials in to an environment server and serves FrozenLake there."""

    async def serve() -> None:
        stop = asyncio.Event()
        environments = {PROVIDED_TAG: HostedLake}
        serving = asyncio.create_task(serve_environment_async(target, environments, capacity=MAX_SESSIONS, stop=stop))
        await _report(pipe, target)
        serving.cancel()
        await asyncio.wait((serving,))

    asyncio.run(serve())


def serve_echo(pipe: Connection) -> None:
    """Serves a bare unary echo under the name of `Step`: no interceptor, no session, no game."""

    async def echo(request: pb.StepRequest, context: object) -> pb.StepResponse:
        return pb.StepResponse(observation=request.action)

    async def serve() -> None:
        server = grpc.aio.server(
            options=server_options(ENVIRONMENT_MESSAGE_BYTES), maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS
        )
        step = grpc.unary_unary_rpc_method_handler(
            echo, request_deserializer=pb.StepRequest.FromString, response_serializer=pb.StepResponse.SerializeToString
        )
        handlers = grpc.method_handlers_generic_handler(EnvironmentServer.full_name, {"Step": step})
        server.add_generic_rpc_handlers((handlers,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await _report(pipe, f"127.0.0.1:{port}")
        await server.stop(1.0)

    asyncio.run(serve())


def serve_openenv(pipe: Connection, on_loop: bool) -> None:
    """Serves FrozenLake with OpenEnv's own server.

    Args:
        pipe: To the benchmark.
        on_loop: Whether turns run on its event loop (`step_async`) instead of in its threads, as most are written.
    """
    import uvicorn

    from rollwire.cli.bench_environment_openenv import openenv_app

    async def serve() -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        config = uvicorn.Config(openenv_app(on_loop, MAX_SESSIONS), log_level="critical", access_log=False)
        server: Any = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await _report(pipe, f"127.0.0.1:{listener.getsockname()[1]}")
        server.should_exit = server.force_exit = True
        await asyncio.wait((serving,), timeout=5)

    asyncio.run(serve())


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
