"""The processes of `rollwire bench weights`: a server that publishes, a reader, a link of limited speed between them.

Each takes commands from a pipe: a tuple of the command's name and its arguments, answered by one value.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import grpc.aio
import numpy as np

from rollwire.cli.bench_weights_model import ONE_ULP_SHARE, ModelShape, change, make_parameters, published
from rollwire.rpc.channel import open_channel
from rollwire.rpc.digests import tensor_hasher
from rollwire.rpc.limits import INTERNAL_MESSAGE_BYTES, MIB
from rollwire.rpc.memory_file import memory_file
from rollwire.rpc.same_host import SameHostOffer
from rollwire.rpc.weight_buffers import HostBuffers, anonymous_memory
from rollwire.rpc.weight_delta import supported_encodings
from rollwire.rpc.weight_lanes import Lanes
from rollwire.rpc.weight_publisher import WeightPublisher
from rollwire.rpc.weight_stream import HeldWeights, WeightAssembler, receive_weights
from rollwire.rpc.weight_wire import WEIGHTS_SERVICE, fetch_weights_method
from rollwire.serving.logs import configure_logging
from rollwire.serving.server import Binding, Readiness, serving
from rollwire.serving.weights import WeightsServicer
from rollwire.v1 import weights_pb2

LINEAGE: Final = "bench"
_TIMEOUT_S: Final = 300.0
_BURST_BYTES: Final = 256 * 1024

Handler = Callable[..., Awaitable[Any]]


async def _answer(pipe: Connection, commands: dict[str, Handler]) -> None:
    """Carries out commands until the other end closes the pipe."""
    while True:
        try:
            name, *arguments = await asyncio.to_thread(pipe.recv)
        except (EOFError, OSError):
            return
        pipe.send(await commands[name](*arguments))


class _Weights:
    """`WeightsService` as the learner has it, and nothing else."""

    full_name = WEIGHTS_SERVICE
    message_bytes = INTERNAL_MESSAGE_BYTES

    def __init__(self, publisher: WeightPublisher) -> None:
        self._servicer = WeightsServicer(lambda: publisher)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service."""
        self._servicer.register(server)

    async def start(self, readiness: Readiness) -> None:
        """Nothing to load."""
        await readiness.set(True)

    async def close(self) -> None:
        """Nothing to free."""


class _Learner:
    """Parameters, their publisher and the addresses that serve them."""

    def __init__(self, shape: ModelShape, seed: int) -> None:
        before = _status_bytes("VmRSS")
        self._layouts = shape.layouts()
        self._generator = np.random.default_rng(seed)
        self._parameters = make_parameters(self._layouts, self._generator)
        self.publisher = WeightPublisher()
        self._step = -1
        self._own_bytes = before + sum(layout.byte_size for layout in self._layouts.values())

    async def publish(self, share: float, one_ulp_share: float = ONE_ULP_SHARE) -> dict[str, float]:
        """Changes a share of the values and publishes the next version; returns how long that took."""
        await asyncio.to_thread(change, self._parameters, share, self._generator, one_ulp_share)
        self._step += 1
        version = weights_pb2.WeightVersion(lineage=LINEAGE, step=self._step)
        start = time.perf_counter()
        manifest = await asyncio.to_thread(self.publisher.publish, version, published(self._parameters, self._layouts))
        return {"seconds": time.perf_counter() - start, "payload_bytes": manifest.payload_bytes}

    async def peak_extra_bytes(self) -> int:
        """Returns the peak of resident memory beyond the parameters themselves and an idle server."""
        return _status_bytes("VmHWM") - self._own_bytes

    def send_raw(self, listener: socket.socket) -> None:
        """Sends the parameters to everyone who connects, without any protocol."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                for words in self._parameters.values():
                    view = words.data.cast("B")
                    for start in range(0, len(view), MIB):
                        connection.sendall(view[start : start + MIB])


def serve(pipe: Connection, shape: ModelShape, seed: int) -> None:
    """Runs the server: says gRPC address and raw port, then takes `publish`, `peak_extra_bytes` and `cpu_s`."""

    async def run() -> None:
        learner = _Learner(shape, seed)
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=learner.send_raw, args=(listener,), daemon=True).start()
        async with serving(_Weights(learner.publisher), Binding(), grace_s=1.0) as running:
            pipe.send((running.address, listener.getsockname()[1]))
            commands: dict[str, Handler] = {
                "publish": learner.publish,
                "peak_extra_bytes": learner.peak_extra_bytes,
                "cpu_s": _cpu_s,
            }
            await _answer(pipe, commands)
        listener.close()

    configure_logging("learner", level="WARNING")
    asyncio.run(run())


class _Reader:
    """A rollout server's side: fetches into two buffers that alternate."""

    def __init__(self, shape: ModelShape) -> None:
        self._layouts = shape.layouts()
        self._buffers = HostBuffers(memory_file)
        self._held: HeldWeights | None = None
        self._raw = anonymous_memory(sum(layout.byte_size for layout in self._layouts.values()))

    async def raw(self, port: int, hashed: bool) -> float:
        """Receives the parameters from a bare socket into touched memory; returns the time in seconds."""
        return await asyncio.to_thread(self._receive_raw, port, hashed)

    async def full(self, address: str) -> dict[str, float]:
        """Fetches the present version whatever is held."""
        return await self._fetch(address, None)

    async def delta(self, address: str) -> dict[str, float]:
        """Fetches what changed since the version that is held."""
        return await self._fetch(address, self._held)

    async def same_host(self, address: str) -> dict[str, float]:
        """Takes the present version over as a file, whatever is held."""
        with SameHostOffer() as offer:
            return await self._fetch(address, None, offer)

    async def drain(self, address: str, readers: int) -> float:
        """Reads the present version several times at once and drops it; returns the time in seconds."""
        start = time.perf_counter()
        await asyncio.gather(*(_drain(address) for _ in range(readers)))
        return time.perf_counter() - start

    async def _fetch(
        self, address: str, base: HeldWeights | None, offer: SameHostOffer | None = None
    ) -> dict[str, float]:
        received = 0
        start = time.perf_counter()
        async with open_channel(address) as channel:
            request = weights_pb2.FetchWeightsRequest(
                have=base.version if base is not None else None,
                accepted_encodings=supported_encodings(),
                same_host_socket=offer.name if offer is not None else "",
            )
            call = fetch_weights_method(channel)(request, timeout=_TIMEOUT_S)

            async def counted() -> AsyncIterator[bytes]:
                nonlocal received
                async for message in call:
                    received += len(message)
                    yield message

            version = weights_pb2.WeightVersion(lineage=LINEAGE, step=self._next)
            assembler = WeightAssembler(
                self._layouts,
                version,
                base=base,
                buffers=self._buffers,
                take_file=offer.take if offer is not None else None,
            )
            held = await receive_weights(counted(), assembler)
        if offer is not None and not assembler.copied:
            raise RuntimeError("the server handed no file over")
        seconds = time.perf_counter() - start
        if self._held is not None:
            self._held.release()
        self._held = held
        return {"seconds": seconds, "bytes": received}

    async def expect(self, step: int) -> None:
        """Says which version the next fetch brings."""
        self._next = step

    def _receive_raw(self, port: int, hashed: bool) -> float:
        start, received = time.perf_counter(), 0
        with Lanes(1) as lanes, socket.create_connection(("127.0.0.1", port)) as connection:
            digest, lane = tensor_hasher(), lanes.lane(self._raw.nbytes)
            while received < self._raw.nbytes:
                count = connection.recv_into(self._raw[received : received + MIB])
                if not count:
                    raise ConnectionError(f"the raw socket ended after {received} of {self._raw.nbytes} bytes")
                if hashed:
                    lane.submit(digest.update, self._raw[received : received + count])
                received += count
            lanes.join()
        return time.perf_counter() - start


async def _cpu_s() -> float:
    """Returns the CPU time of the process so far."""
    return time.process_time()


async def _drain(address: str) -> None:
    async with open_channel(address) as channel:
        async for _ in fetch_weights_method(channel)(weights_pb2.FetchWeightsRequest(), timeout=_TIMEOUT_S):
            pass


def read(pipe: Connection, shape: ModelShape) -> None:
    """Runs the reader: takes `raw`, `expect`, `full`, `delta`, `same_host`, `drain` and `cpu_s`."""

    async def run() -> None:
        reader = _Reader(shape)
        pipe.send(os.getpid())
        commands: dict[str, Handler] = {
            "raw": reader.raw,
            "expect": reader.expect,
            "full": reader.full,
            "delta": reader.delta,
            "same_host": reader.same_host,
            "drain": reader.drain,
            "cpu_s": _cpu_s,
        }
        await _answer(pipe, commands)

    asyncio.run(run())


def throttle(pipe: Connection, address: str, bytes_per_s: float) -> None:
    """Runs a TCP link to an address that carries a limited number of bytes per second in either direction."""

    async def run() -> None:
        host, port = address.rsplit(":", 1)

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there_reader, there_writer = await asyncio.open_connection(host, int(port), limit=MIB)
            await asyncio.gather(_carry(reader, there_writer, bytes_per_s), _carry(there_reader, writer, bytes_per_s))

        server = await asyncio.start_server(connect, "127.0.0.1", 0, limit=MIB)
        pipe.send(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with server:
            await _answer(pipe, {})

    asyncio.run(run())


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bytes_per_s: float) -> None:
    """Copies one direction through a token bucket until it ends."""
    ready = time.perf_counter()
    with suppress(ConnectionError):
        while piece := await reader.read(64 * 1024):
            now = time.perf_counter()
            ready = max(ready, now - _BURST_BYTES / bytes_per_s) + len(piece) / bytes_per_s
            if ready > now:
                await asyncio.sleep(ready - now)
            writer.write(piece)
            await writer.drain()
    writer.close()


def _status_bytes(name: str) -> int:
    """Returns a size from the process status, such as `VmRSS`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
