"""Updates as changes to what is held: from a real publisher, from another rollout server, and when they do not fit."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from rollwire.client.weights import WeightsClient
from rollwire.rpc.errors import Reason, RollwireError, not_found
from rollwire.rpc.limits import INTERNAL_MESSAGE_BYTES
from rollwire.rpc.weight_publisher import WeightPublisher
from rollwire.rpc.weight_stream import HostTensor, TensorLayout, WeightAssembler, build_manifest, receive_weights
from rollwire.rpc.weight_wire import WEIGHTS_SERVICE
from rollwire.serving.server import Binding, Readiness, serving
from rollwire.serving.weights import WeightsServicer
from rollwire.v1 import weights_pb2

Response = weights_pb2.FetchWeightsResponse


class Spoilt:
    """A stream of messages that a test may have changed; always over the network."""

    shared = None

    def __init__(self, messages: Iterable[bytes]) -> None:
        self._messages = messages

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._messages)


class Publisher:
    """Serves weights as the learner does: each step changes some values of each tensor. `fault` may spoil a stream."""

    full_name = WEIGHTS_SERVICE
    message_bytes = INTERNAL_MESSAGE_BYTES

    def __init__(self, initial: dict[str, HostTensor], version: Callable[[int], weights_pb2.WeightVersion]) -> None:
        self.publisher = WeightPublisher(chunk_bytes=1 << 14)
        self.requests: list[weights_pb2.FetchWeightsRequest] = []
        self.fault: Callable[[list[bytes], bool], Iterable[bytes]] = lambda messages, relative: messages
        self.target = ""
        self._version = version
        self._initial = initial

    def tensors(self, step: int) -> dict[str, HostTensor]:
        found = {}
        for name, tensor in self._initial.items():
            words = np.frombuffer(tensor.data, "<u4").copy()
            for at in range(1, step + 1):
                words[at::150] ^= 1 << at
            found[name] = HostTensor(tensor.dtype, tensor.shape, memoryview(words).cast("B"))
        return found

    def publish(self, step: int) -> bytes:
        manifest = self.publisher.publish(
            self._version(step),
            (
                (name, TensorLayout(tensor.dtype, tensor.shape), [tensor.data])
                for name, tensor in self.tensors(step).items()
            ),
        )
        assert manifest.digest == build_manifest(self._version(step), self.tensors(step)).digest
        return manifest.digest

    def open(self, request: weights_pb2.FetchWeightsRequest) -> Spoilt:
        self.requests.append(request)
        stream = self.publisher.open(request)
        return Spoilt(self.fault(list(stream), stream.manifest.HasField("base")))

    def register(self, server: grpc.aio.Server) -> None:
        WeightsServicer(lambda: self).register(server)

    async def start(self, readiness: Readiness) -> None:
        await readiness.set(True)

    async def close(self) -> None:
        """Nothing to free."""


@pytest.fixture
def publishing(weights: Any) -> Any:
    """Returns a context manager that serves a publisher with the version of step 0."""

    @asynccontextmanager
    async def run(bench: Any) -> AsyncIterator[Publisher]:
        publisher = Publisher(weights(0), bench.version)
        publisher.publish(0)
        async with serving(publisher, Binding(), grace_s=0.5) as running:
            publisher.target = running.address
            yield publisher

    return run


def source(target: str) -> weights_pb2.WeightSource:
    return weights_pb2.WeightSource(target=target)


async def test_servers_follow_by_changes_and_hold_every_version_exactly(serve: Any, publishing: Any) -> None:
    async with serve(active=None) as bench, publishing(bench) as publisher:
        whole = publisher.publisher.manifest.payload_bytes
        answer = await bench.update(0, source=source(publisher.target))
        assert answer.received_bytes == whole
        for step in range(1, 6):
            digest = publisher.publish(step)
            if step == 3:
                continue  # a version that is skipped
            answer = await bench.update(step, source=source(publisher.target))
            assert answer.digest == digest
            assert 0 < answer.received_bytes < 0.05 * whole
        info = await bench.client.get_info()
        assert (info.active_version, info.active_digest) == (bench.version(5), digest)
        held = bench.server._servicer.parts.updater._buffers
        assert held.taken == 1 and len(held._free) == 1  # two buffers, however many updates


async def test_a_base_that_the_source_no_longer_knows_means_the_whole_version(serve: Any, publishing: Any) -> None:
    async with serve(active=None) as bench, publishing(bench) as publisher:
        await bench.update(0, source=source(publisher.target))
        publisher.publisher = WeightPublisher()
        digest = publisher.publish(1)
        answer = await bench.update(1, source=source(publisher.target))
        assert answer.digest == digest and answer.received_bytes == publisher.publisher.manifest.payload_bytes


def flipped(messages: list[bytes], number: int) -> list[bytes]:
    """The stream with a bit of a chunk's payload changed."""
    response = Response.FromString(messages[number])
    data = bytearray(response.chunk.data)
    data[len(data) // 2] ^= 16
    response.chunk.data = bytes(data)
    return [*messages[:number], response.SerializeToString(), *messages[number + 1 :]]


def rebased(messages: list[bytes]) -> list[bytes]:
    """The stream as changes to other weights under the same version."""
    first = Response.FromString(messages[0])
    first.manifest.base_digest = bytes(32)
    return [first.SerializeToString(), *messages[1:]]


@pytest.mark.parametrize(
    "fault",
    [
        lambda messages: flipped(messages, 1),
        rebased,
        lambda messages: messages[:-1],
        lambda messages: [messages[0], messages[-1]],
    ],
    ids=["flipped bit", "another base", "no commit", "no payload"],
)
async def test_changes_that_do_not_fit_are_followed_by_the_whole_version(
    serve: Any, publishing: Any, fault: Callable[[list[bytes]], list[bytes]]
) -> None:
    async with serve(active=None) as bench, publishing(bench) as publisher:
        await bench.update(0, source=source(publisher.target))
        digest = publisher.publish(1)
        publisher.fault = lambda messages, relative: fault(messages) if relative else messages
        publisher.requests.clear()
        answer = await bench.update(1, source=source(publisher.target))
        assert answer.digest == digest
        assert [request.HasField("have") for request in publisher.requests] == [True, False]
        assert answer.received_bytes >= publisher.publisher.manifest.payload_bytes
        publisher.fault = lambda messages, relative: messages
        digest = publisher.publish(2)
        assert (await bench.update(2, source=source(publisher.target))).digest == digest


async def test_changes_cut_at_and_around_every_tensor_boundary_leave_the_old_version(
    serve: Any, publishing: Any
) -> None:
    async with serve(active=None) as bench, publishing(bench) as publisher:
        digest = publisher.publisher.manifest.digest
        await bench.update(0, source=source(publisher.target))
        publisher.publish(1)
        places: list[int] = []
        place = 0

        def cut(messages: list[bytes], relative: bool) -> Iterable[bytes]:
            if not relative:
                raise not_found(Reason.UNKNOWN_VERSION, "no whole version here")
            manifest = Response.FromString(messages[0]).manifest
            ends = [0, *(spec.payload_offset + spec.payload_bytes for spec in manifest.tensors)]
            total = manifest.payload_bytes
            places[:] = sorted({end + shift for end in ends for shift in (-1, 0, 1) if 0 <= end + shift < total})
            yield messages[0]
            data = b"".join(Response.FromString(message).chunk.data for message in messages[1:-1])[: places[place]]
            if data:
                yield Response(chunk=_chunk(data)).SerializeToString()
            if place % 2:
                yield messages[-1]

        publisher.fault = cut
        while not places or place < len(places):
            with pytest.raises(RollwireError) as caught:
                await bench.update(1, source=source(publisher.target))
            assert caught.value.reason == Reason.UNKNOWN_VERSION  # of the second request, for the whole version
            place += 1
        info = await bench.client.get_info()
        assert (info.active_version, info.active_digest) == (bench.version(0), digest)
        publisher.fault = lambda messages, relative: messages
        answer = await bench.update(1, source=source(publisher.target))
        assert answer.received_bytes < 0.05 * publisher.publisher.manifest.payload_bytes


def _chunk(data: bytes) -> weights_pb2.WeightChunk:
    return weights_pb2.WeightChunk(crc32=zlib.crc32(data), data=data)


async def test_an_update_waits_while_the_source_is_publishing(serve: Any, publishing: Any) -> None:
    async with serve(active=None) as bench, publishing(bench) as publisher:
        await bench.update(0, source=source(publisher.target))
        begin, refused = publisher.publisher, asyncio.Event()
        loop = asyncio.get_running_loop()

        class Busy:
            """A publisher in the middle of its work."""

            def open(self, request: weights_pb2.FetchWeightsRequest) -> Iterable[bytes]:
                loop.call_soon_threadsafe(refused.set)
                raise RollwireError(
                    grpc.StatusCode.UNAVAILABLE, Reason.WEIGHT_SOURCE_UNAVAILABLE, "publishing", retry_after_s=1.0
                )

        publisher.publisher = Busy()
        update = asyncio.create_task(bench.update(1, source=source(publisher.target)))
        await asyncio.wait_for(refused.wait(), 10)
        publisher.publisher = begin
        digest = publisher.publish(1)
        assert (await update).digest == digest


async def test_a_rollout_server_passes_its_version_on(serve: Any, publishing: Any) -> None:
    network = {"same_host_weights": False}
    async with (
        serve(active=None) as first,
        serve(active=None, rollout=network) as second,
        serve(active=None, rollout=network) as third,
        publishing(first) as publisher,
    ):
        whole = publisher.publisher.manifest.payload_bytes
        with pytest.raises(RollwireError) as caught:
            await second.update(0, source=source(first.client.target))
        assert caught.value.reason == Reason.UNKNOWN_VERSION
        for step in range(4):
            digest = publisher.publish(step)
            answer = await first.update(step, source=source(publisher.target))
            asked = len(publisher.requests)
            passed = await second.update(step, source=source(first.client.target))
            again = await third.update(step, source=source(second.client.target))
            assert len(publisher.requests) == asked
            assert answer.digest == passed.digest == again.digest == digest
            assert answer.received_bytes == passed.received_bytes == again.received_bytes
            assert (passed.received_bytes < 0.05 * whole) == (step > 0)


async def test_readers_beside_updates_get_whole_versions_or_errors(serve: Any, publishing: Any) -> None:
    """While a server goes from version to version, readers at it never get a mix."""
    async with serve(active=None) as bench, publishing(bench) as publisher:
        digests = {0: publisher.publisher.manifest.digest}
        await bench.update(0, source=source(publisher.target))
        seen: list[int] = []
        stop = asyncio.Event()

        async def read() -> None:
            layouts = bench.server._servicer.parts.policy.engine.layouts()
            async with WeightsClient(bench.client.target) as client:
                while not stop.is_set():
                    version = (await bench.client.get_info()).active_version
                    if not version.lineage:
                        await asyncio.sleep(0.001)  # being loaded
                        continue
                    request = weights_pb2.FetchWeightsRequest(version=version)
                    try:
                        held = await receive_weights(client.fetch_weights(request), WeightAssembler(layouts, version))
                    except RollwireError as error:
                        assert error.reason == Reason.UNKNOWN_VERSION
                    else:
                        assert held.digest == digests[version.step]
                        seen.append(version.step)

        readers = [asyncio.create_task(read()) for _ in range(3)]
        for step in range(1, 8):
            digests[step] = publisher.publish(step)
            await bench.update(step, source=source(publisher.target))
        async with asyncio.timeout(20):
            while seen.count(7) < 3 and not any(reader.done() for reader in readers):
                await asyncio.sleep(0.01)
        stop.set()
        await asyncio.gather(*readers)
