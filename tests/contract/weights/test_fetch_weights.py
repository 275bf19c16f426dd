"""`FetchWeights` as raw messages over a real connection: the hand-written path and the generated one are one method."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from rollwire.rpc.channel import open_channel
from rollwire.rpc.errors import Reason, from_rpc_error
from rollwire.rpc.limits import INTERNAL_MESSAGE_BYTES
from rollwire.rpc.weight_delta import supported_encodings
from rollwire.rpc.weight_publisher import WeightPublisher
from rollwire.rpc.weight_stream import TensorLayout, WeightAssembler, receive_weights
from rollwire.rpc.weight_wire import add_fetch_weights_to_server, fetch_weights_method
from rollwire.serving.server import Binding, Readiness, serving
from rollwire.v1 import learner_pb2, learner_pb2_grpc, weights_pb2

LAYOUTS = {
    "large": TensorLayout(weights_pb2.DATA_TYPE_BFLOAT16, (1500, 1024)),
    "small": TensorLayout(weights_pb2.DATA_TYPE_FLOAT32, (17,)),
}


class Weights(learner_pb2_grpc.LearnerServiceServicer):  # type: ignore[misc]
    """A learner that does nothing but serve weights."""

    full_name = "rollwire.v1.LearnerService"
    message_bytes = INTERNAL_MESSAGE_BYTES

    def __init__(self, publisher: WeightPublisher) -> None:
        self._publisher = publisher

    def register(self, server: grpc.aio.Server) -> None:
        add_fetch_weights_to_server(self.FetchWeights, server, self)

    async def start(self, readiness: Readiness) -> None:
        await readiness.set(True)

    async def close(self) -> None:
        """Nothing to free."""

    async def FetchWeights(self, request: learner_pb2.FetchWeightsRequest, context: Any) -> AsyncIterator[bytes]:
        stream = await asyncio.to_thread(self._publisher.open, request)
        for message in stream:
            yield message

    async def GetInfo(self, request: Any, context: Any) -> learner_pb2.LearnerServiceGetInfoResponse:
        return learner_pb2.LearnerServiceGetInfoResponse(parameters=3)


def _version(step: int) -> weights_pb2.WeightVersion:
    return weights_pb2.WeightVersion(lineage="lineage-a", step=step)


def _publish(publisher: WeightPublisher, step: int, words: np.ndarray) -> None:
    small = np.arange(17, dtype="<f4")
    tensors = [
        ("large", LAYOUTS["large"], [memoryview(words).cast("B")]),
        ("small", LAYOUTS["small"], [small.data.cast("B")]),
    ]
    publisher.publish(_version(step), tensors)


async def test_versions_travel_in_full_and_as_changes() -> None:
    publisher = WeightPublisher()
    words = np.random.default_rng(0).integers(0, 1 << 16, 1500 * 1024).astype("<u2")
    _publish(publisher, 0, words)
    async with serving(Weights(publisher), Binding(), grace_s=1) as running, open_channel(running.address) as channel:
        fetch = fetch_weights_method(channel)
        request = learner_pb2.FetchWeightsRequest(version=_version(0))
        full = await receive_weights(fetch(request, timeout=30), WeightAssembler(LAYOUTS, _version(0)))
        assert bytes(full.tensors["large"].data) == words.tobytes()
        words[::100] += 1
        _publish(publisher, 1, words)
        request = learner_pb2.FetchWeightsRequest(have=full.version, accepted_encodings=supported_encodings())
        received = 0

        async def counted() -> AsyncIterator[bytes]:
            nonlocal received
            async for message in fetch(request, timeout=30):
                received += len(message)
                yield message

        after = await receive_weights(counted(), WeightAssembler(LAYOUTS, _version(1), base=full))
        assert bytes(after.tensors["large"].data) == words.tobytes()
        assert received < 0.02 * words.nbytes


async def test_generated_clients_read_the_same_method_and_the_others_still_work() -> None:
    publisher = WeightPublisher()
    words = np.zeros(1500 * 1024, "<u2")
    _publish(publisher, 0, words)
    async with serving(Weights(publisher), Binding(), grace_s=1) as running, open_channel(running.address) as channel:
        stub = learner_pb2_grpc.LearnerServiceStub(channel)
        assert (await stub.GetInfo(learner_pb2.LearnerServiceGetInfoRequest(), timeout=30)).parameters == 3
        assembler = WeightAssembler(LAYOUTS, _version(0))
        held = await receive_weights(stub.FetchWeights(learner_pb2.FetchWeightsRequest(), timeout=30), assembler)
        assert bytes(held.tensors["large"].data) == words.tobytes()


@pytest.mark.parametrize("timeout_s", [30, None])
async def test_errors_are_those_of_every_method(timeout_s: float | None) -> None:
    weights = Weights(WeightPublisher())
    async with serving(weights, Binding(), grace_s=1) as running, open_channel(running.address) as channel:
        call = fetch_weights_method(channel)(learner_pb2.FetchWeightsRequest(), timeout=timeout_s)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    reason = Reason.UNKNOWN_VERSION if timeout_s else Reason.DEADLINE_REQUIRED
    assert from_rpc_error(caught.value).reason == reason
