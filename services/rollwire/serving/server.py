"""The life of a server process: bind, start, serve, drain, exit.

Liveness is the health service's empty name; readiness is the name of the gRPC service and is set by the service itself.
On SIGTERM or SIGINT readiness goes first, then new calls are refused, then running calls get `DRAIN_GRACE_S` to finish.
A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rollwire.rpc.limits import DRAIN_GRACE_S, MAX_CONCURRENT_RPCS, server_options
from rollwire.serving.interceptors import CallGate
from rollwire.serving.logs import get_logger

_log = get_logger(__name__)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class ServeError(Exception):
    """The server cannot start or cannot go on; the text is one line for the user."""


@dataclass(frozen=True)
class Binding:
    """Where and how a server listens.

    Attributes:
        host: Interface; a host that is not loopback needs `insecure`.
        port: TCP port; 0 takes a free one.
        insecure: Confirms that anyone who reaches the port may call the server.
        ready_file: Written once the port is bound: JSON with `address` and `pid`.
        debug_services: Offer gRPC reflection.
    """

    host: str = "127.0.0.1"
    port: int = 0
    insecure: bool = False
    ready_file: Path | None = None
    debug_services: bool = False


class Readiness:
    """Sets the readiness that the health service reports for one gRPC service.

    Attributes:
        failure: Done, with the cause in one line, once the service cannot answer any more.
        draining: Set when the server begins to shut down: new calls are refused, and streams should come to an end.
    """

    def __init__(self, servicer: health.aio.HealthServicer, name: str) -> None:
        self._servicer = servicer
        self._name = name
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.draining = asyncio.Event()

    async def set(self, ready: bool) -> None:
        """Reports SERVING or NOT_SERVING from now on."""
        await self._servicer.set(self._name, _SERVING if ready else _NOT_SERVING)

    async def fail(self, cause: str) -> None:
        """Reports NOT_SERVING and ends the server, which cannot answer any more. The cause is one line for the user."""
        await self.set(False)
        if not self.failure.done():
            self.failure.set_result(cause)


class Service(Protocol):
    """One gRPC service with its state.

    `message_bytes` is the largest message on its port. `start` runs after the port is bound and is where slow work such
    as loading a model belongs; it reports readiness when calls can be answered. `close` runs after the last call.
    """

    full_name: str
    message_bytes: int

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer to the server."""

    async def start(self, readiness: Readiness) -> None:
        """Makes the service able to answer; raises `ServeError` when that is impossible."""

    async def close(self) -> None:
        """Frees what `start` took."""


@dataclass(frozen=True)
class RunningServer:
    """A server that accepts calls.

    Attributes:
        address: `host:port`.
        service: What it serves.
        failure: Done, with the cause in one line, once the service cannot answer any more.
    """

    address: str
    service: Service
    failure: asyncio.Future[str]


@asynccontextmanager
async def serving(
    service: Service, binding: Binding, *, grace_s: float = DRAIN_GRACE_S
) -> AsyncIterator[RunningServer]:
    """Serves while the context is open, then drains.

    Raises:
        ServeError: The port cannot be bound or the service cannot start.
    """
    _check_binding(binding)
    gate = CallGate()
    server = grpc.aio.server(
        options=server_options(service.message_bytes),
        maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS,
    )
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    await health_servicer.set("", _SERVING)
    readiness = Readiness(health_servicer, service.full_name)
    await readiness.set(False)
    guarded = gate.guard(server)
    service.register(guarded)
    if binding.debug_services:
        _add_reflection(server, guarded.service_names)
    address = _bind(server, binding)
    await server.start()
    try:
        if binding.ready_file is not None:
            _write_ready_file(binding.ready_file, address)
        _log.info("listening", address=address, grpc_service=service.full_name)
        await service.start(readiness)
        yield RunningServer(address, service, readiness.failure)
    finally:
        await health_servicer.enter_graceful_shutdown()
        gate.draining = True
        readiness.draining.set()
        await server.stop(grace_s)
        await service.close()
        _log.info("stopped", address=address)


async def serve_forever(service: Service, binding: Binding) -> None:
    """Serves until SIGTERM or SIGINT; a second signal ends the process at once.

    Raises:
        ServeError: The server cannot start, or cannot go on.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with serving(service, binding) as server:
        with _without_garbage_search():
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait((stopping, server.failure), return_when=asyncio.FIRST_COMPLETED)
        if server.failure.done():
            stopping.cancel()
            raise ServeError(server.failure.result())


@contextmanager
def _without_garbage_search() -> Iterator[None]:
    """Leaves what exists out of the search for garbage while the context is open.

    What a server has loaded lives as long as the process. Searching all objects of torch and transformers again and
    again would stop everything for tenths of a second at a time.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _check_binding(binding: Binding) -> None:
    loopback = binding.host in ("localhost", "::1", "[::1]") or binding.host.startswith("127.")
    if not loopback and not binding.insecure:
        raise ServeError(
            f"--host is {binding.host!r}: anyone who reaches that address could call this server. Bind 127.0.0.1, "
            "or add --insecure if the network is private and trusted"
        )


def _bind(server: grpc.aio.Server, binding: Binding) -> str:
    wanted = f"{binding.host}:{binding.port}"
    try:
        port = server.add_insecure_port(wanted)
    except RuntimeError as error:
        raise ServeError(
            f"cannot listen on {wanted}: the port is in use or the address is not local; "
            "choose another --port, or 0 for a free one"
        ) from error
    return f"{binding.host}:{port}"


def _write_ready_file(path: Path, address: str) -> None:
    """Writes the file completely or not at all: a reader never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps({"address": address, "pid": os.getpid()}))
        partial.replace(path)
    except OSError as error:
        raise ServeError(f"{path} cannot be written: {error.strerror or error}; check space and permissions") from error


def _add_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    from grpc_reflection.v1alpha import reflection

    reflection.enable_server_reflection((*sorted(service_names), health.SERVICE_NAME, reflection.SERVICE_NAME), server)
