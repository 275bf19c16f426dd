"""A rollout server beside its source takes whole versions over as a file, and falls back to the network by itself."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.limits import INTERNAL_MESSAGE_BYTES
from rollwire.rpc.memory_file import FileMapping, SharedVersion, memory_file
from rollwire.rpc.weight_publisher import WeightPublisher, WeightStream
from rollwire.rpc.weight_stream import TensorLayout
from rollwire.rpc.weight_wire import WEIGHTS_SERVICE
from rollwire.serving.server import Binding, Readiness, serving
from rollwire.serving.weights import WeightsServicer
from rollwire.v1 import weights_pb2

Edit = Callable[[WeightStream], None]


class Source:
    """Serves weights as the learner does; `edit` may change a stream before it is sent or handed over."""

    full_name = WEIGHTS_SERVICE
    message_bytes = INTERNAL_MESSAGE_BYTES

    def __init__(self) -> None:
        self.publisher = WeightPublisher()
        self.requests: list[weights_pb2.FetchWeightsRequest] = []
        self.edit: Edit = lambda stream: None
        self.target = ""

    def open(self, request: weights_pb2.FetchWeightsRequest) -> WeightStream:
        self.requests.append(request)
        stream = self.publisher.open(request)
        self.edit(stream)
        return stream

    def publish(self, version: weights_pb2.WeightVersion, tensors: dict[str, Any]) -> bytes:
        parts = (
            (name, TensorLayout(tensor.dtype, tensor.shape), [tensor.data.cast("B")])
            for name, tensor in tensors.items()
        )
        return self.publisher.publish(version, parts).digest

    def register(self, server: grpc.aio.Server) -> None:
        WeightsServicer(lambda: self).register(server)

    async def start(self, readiness: Readiness) -> None:
        await readiness.set(True)

    async def close(self) -> None:
        """Nothing to free."""


@asynccontextmanager
async def serving_source() -> AsyncIterator[Source]:
    source = Source()
    async with serving(source, Binding(), grace_s=0.5) as running:
        source.target = running.address
        yield source


def at(target: str) -> weights_pb2.WeightSource:
    return weights_pb2.WeightSource(target=target)


async def test_whole_versions_come_as_files_from_learner_and_rollout_server(serve: Any, weights: Any) -> None:
    async with serve(active=None) as first, serve(active=None) as second, serving_source() as source:
        for step in range(3):
            digest = source.publish(first.version(step), weights(step))
            answers = [
                await first.update(step, source=at(source.target)),
                await second.update(step, source=at(first.client.target)),
            ]
            for bench, answer in zip((first, second), answers, strict=True):
                assert answer.digest == digest == (await bench.client.get_info()).active_digest
            # Another seed changes everything, so no changes are kept that could be sent instead.
            assert [answer.received_bytes for answer in answers] == [0, 0]
        assert len(source.requests) == 3


async def test_it_can_be_switched_off(serve: Any, weights: Any) -> None:
    async with serve(active=None, rollout={"same_host_weights": False}) as bench, serving_source() as source:
        digest = source.publish(bench.version(0), weights(0))
        answer = await bench.update(0, source=at(source.target))
        assert answer.digest == digest
        assert answer.received_bytes == source.publisher.manifest.payload_bytes
        assert source.requests[0].same_host_socket == ""


def other_content(size_change: int, damage: bytes) -> Edit:
    """Hands over a file of another size and with other bytes at its beginning; what is sent stays right."""

    def edit(stream: WeightStream) -> None:
        if stream.shared is None:
            return
        right = stream.shared
        size = os.fstat(right.file.descriptor).st_size
        view = memory_file(size + size_change)
        view[:] = memoryview(right.file)[: size + size_change]
        view[: len(damage)] = damage
        assert isinstance(view.obj, FileMapping)
        stream.shared = SharedVersion(right.manifest, view.obj, right.offsets)

    return edit


def other_offsets(stream: WeightStream) -> None:
    if stream.shared is not None:
        stream.shared = SharedVersion(
            stream.shared.manifest, stream.shared.file, [offset + 4 for offset in stream.shared.offsets]
        )


def too_few(stream: WeightStream) -> None:
    if stream.shared is not None:
        stream.shared = SharedVersion(stream.shared.manifest, stream.shared.file, stream.shared.offsets[:-1])


def beyond(stream: WeightStream) -> None:
    if stream.shared is not None:
        stream.shared = SharedVersion(
            stream.shared.manifest, stream.shared.file, [(1 << 64) - 1 for _ in stream.shared.offsets]
        )


UNUSUAL = {
    "another content": other_content(0, b"\1\2\3\4"),
    "truncated": other_content(-4, b""),
    "nearly empty": other_content(-10_000, b""),
    "other offsets": other_offsets,
    "too few tensors": too_few,
    "offsets beyond everything": beyond,
}


@pytest.mark.parametrize("edit", UNUSUAL.values(), ids=UNUSUAL)
async def test_anything_unusual_about_the_file_means_the_network(serve: Any, weights: Any, edit: Edit) -> None:
    async with serve(active=None) as bench, serving_source() as source:
        source.edit = edit
        digest = source.publish(bench.version(0), weights(0))
        answer = await bench.update(0, source=at(source.target))
        assert answer.digest == digest == (await bench.client.get_info()).active_digest
        assert answer.received_bytes == source.publisher.manifest.payload_bytes
        assert [bool(request.same_host_socket) for request in source.requests] == [True, False]


async def test_a_version_replaced_while_it_is_read_leaves_the_old_one(serve: Any, weights: Any) -> None:
    async with serve(active=None) as bench, serving_source() as source:
        digest = source.publish(bench.version(0), weights(0))
        await bench.update(0, source=at(source.target))
        source.publish(bench.version(1), weights(1))

        class Replaced(WeightStream):
            """Publishes the next version as soon as the reader has been given the file of this one."""

            def handed_over(self) -> Iterator[bytes]:
                messages = super().handed_over()
                yield next(messages)
                source.publish(bench.version(2), weights(2))
                yield from messages

        def edit(stream: WeightStream) -> None:
            stream.__class__ = Replaced

        source.edit = edit
        with pytest.raises(RollwireError) as caught:
            await bench.update(1, source=at(source.target))
        assert caught.value.reason == Reason.UNKNOWN_VERSION
        info = await bench.client.get_info()
        assert (info.active_version, info.active_digest) == (bench.version(0), digest)
        assert len(source.requests) == 3  # the second asked for everything over the network


async def test_another_name_than_a_readers_is_refused(serve: Any, weights: Any) -> None:
    from rollwire.client.weights import WeightsClient

    async with serving_source() as source, WeightsClient(source.target) as client:
        for name in ("rollwire-" + "A" * 32, "../../etc/passwd", "/dev/shm/rollwire-" + "0" * 32):
            with pytest.raises(RollwireError) as caught:
                [_ async for _ in client.fetch_weights(weights_pb2.FetchWeightsRequest(same_host_socket=name))]
            assert list(caught.value.fields) == ["same_host_socket"]
