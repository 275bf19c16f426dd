"""`FetchWeights` as raw messages over a real connection: the hand-written path and the generated one are one method."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio
import numpy as np
import pytest

from rollwire.client.weights import WeightsClient
from rollwire.rpc.channel import open_channel
from rollwire.rpc.errors import Reason, RollwireError, from_rpc_error
from rollwire.rpc.limits import INTERNAL_MESSAGE_BYTES
from rollwire.rpc.weight_delta import supported_encodings
from rollwire.rpc.weight_publisher import WeightPublisher
from rollwire.rpc.weight_stream import TensorLayout, WeightAssembler, receive_weights
from rollwire.rpc.weight_wire import WEIGHTS_SERVICE, fetch_weights_method
from rollwire.serving.server import Binding, Readiness, serving
from rollwire.serving.weights import WeightsServicer
from rollwire.v1 import weights_pb2, weights_pb2_grpc

LAYOUTS = {
    "large": TensorLayout(weights_pb2.DATA_TYPE_BFLOAT16, (1500, 1024)),
    "small": TensorLayout(weights_pb2.DATA_TYPE_FLOAT32, (17,)),
}


class Weights:
    """A server that does nothing but serve weights."""

    full_name = WEIGHTS_SERVICE
    message_bytes = INTERNAL_MESSAGE_BYTES

    def __init__(self, publisher: WeightPublisher) -> None:
        self._servicer = WeightsServicer(lambda: publisher)

    def register(self, server: grpc.aio.Server) -> None:
        self._servicer.register(server)

    async def start(self, readiness: Readiness) -> None:
        await readiness.set(True)

    async def close(self) -> None:
        """Nothing to free."""


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
        request = weights_pb2.FetchWeightsRequest(version=_version(0))
        full = await receive_weights(fetch(request, timeout=30), WeightAssembler(LAYOUTS, _version(0)))
        assert bytes(full.tensors["large"].data) == words.tobytes()
        words[::100] += 1
        _publish(publisher, 1, words)
        request = weights_pb2.FetchWeightsRequest(have=full.version, accepted_encodings=supported_encodings())
        received = 0

        async def counted() -> AsyncIterator[bytes]:
            nonlocal received
            async for message in fetch(request, timeout=30):
                received += len(message)
                yield message

        after = await receive_weights(counted(), WeightAssembler(LAYOUTS, _version(1), base=full))
        assert bytes(after.tensors["large"].data) == words.tobytes()
        assert received < 0.02 * words.nbytes


async def test_generated_clients_read_the_same_method() -> None:
    publisher = WeightPublisher()
    words = np.zeros(1500 * 1024, "<u2")
    _publish(publisher, 0, words)
    async with serving(Weights(publisher), Binding(), grace_s=1) as running, open_channel(running.address) as channel:
        stub = weights_pb2_grpc.WeightsServiceStub(channel)
        assembler = WeightAssembler(LAYOUTS, _version(0))
        held = await receive_weights(stub.FetchWeights(weights_pb2.FetchWeightsRequest(), timeout=30), assembler)
        assert bytes(held.tensors["large"].data) == words.tobytes()


@pytest.mark.parametrize("timeout_s", [30, None])
async def test_errors_are_those_of_every_method(timeout_s: float | None) -> None:
    weights = Weights(WeightPublisher())
    async with serving(weights, Binding(), grace_s=1) as running, open_channel(running.address) as channel:
        call = fetch_weights_method(channel)(weights_pb2.FetchWeightsRequest(), timeout=timeout_s)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    reason = Reason.UNKNOWN_VERSION if timeout_s else Reason.DEADLINE_REQUIRED
    assert from_rpc_error(caught.value).reason == reason


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"version": {"lineage": "No"}}, "version.lineage"),
        ({"have": {"lineage": "", "step": 1}}, "have.lineage"),
        ({"accepted_encodings": [weights_pb2.TENSOR_ENCODING_SPARSE]}, "accepted_encodings"),
    ],
)
async def test_fields_outside_their_range(request_: dict[str, object], field: str) -> None:
    weights = Weights(WeightPublisher())
    async with serving(weights, Binding(), grace_s=1) as running, WeightsClient(running.address) as client:
        with pytest.raises(RollwireError) as caught:
            [_ async for _ in client.fetch_weights(weights_pb2.FetchWeightsRequest(**request_))]
    assert list(caught.value.fields) == [field]
