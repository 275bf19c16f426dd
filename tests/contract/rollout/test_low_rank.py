"""Rollout servers that follow a model with adapters: adapters come, and the merged weights serve."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
import transformers

from rollwire.client.weights import WeightsClient
from rollwire.learner.lora import add_adapters
from rollwire.learner.publish import published
from rollwire.rpc.errors import RollwireError
from rollwire.rpc.limits import INTERNAL_MESSAGE_BYTES
from rollwire.rpc.weight_low_rank import LowRank
from rollwire.rpc.weight_publisher import WeightPublisher
from rollwire.rpc.weight_wire import WEIGHTS_SERVICE, crc32_of
from rollwire.serving.config.sections import LoraSection
from rollwire.serving.server import Binding, Readiness, serving
from rollwire.serving.weights import WeightsServicer
from rollwire.v1 import weights_pb2

from .conftest import version

Response = weights_pb2.FetchWeightsResponse
RANK = 1
NETWORK = {"same_host_weights": False}


class Spoilt:
    """A stream of messages that a test may have changed; always over the network."""

    shared = None

    def __init__(self, messages: Iterable[bytes]) -> None:
        self._messages = messages

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._messages)


class Learner:
    """Publishes a model with adapters as the learner does. `fault` may spoil a stream of adapters."""

    full_name = WEIGHTS_SERVICE
    message_bytes = INTERNAL_MESSAGE_BYTES

    def __init__(self, directory: Path) -> None:
        self.publisher = WeightPublisher()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        add_adapters(self.model, LoraSection(rank=RANK, target_modules=["q_proj", "o_proj"]), torch.float32, seed=0)
        self.target = ""
        self.encodings: list[set[int]] = []
        self.fault: Callable[[list[bytes]], list[bytes]] = lambda messages: messages
        self._low_rank: dict[str, LowRank] = {}

    def publish(self, step: int) -> bytes:
        """Publishes the adapters of a step, which are zero at step 0."""
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if ".lora_B." in name:
                    parameter.copy_(min(step, 1) * torch.randn(parameter.shape, generator=generator))
        tensors = published(self.model, torch.float32, low_rank=self._low_rank)
        return self.publisher.publish(version(step), tensors, self._low_rank).digest

    @property
    def adapter_bytes(self) -> int:
        return sum(4 * parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def open(self, request: weights_pb2.FetchWeightsRequest) -> Spoilt:
        stream = self.publisher.open(request)
        self.encodings.append({spec.encoding for spec in stream.manifest.tensors})
        return Spoilt(self.fault(list(stream)))

    def register(self, server: grpc.aio.Server) -> None:
        WeightsServicer(lambda: self).register(server)

    async def start(self, readiness: Readiness) -> None:
        await readiness.set(True)

    async def close(self) -> None:
        """Nothing to free."""


@asynccontextmanager
async def learning(directory: Path) -> AsyncIterator[Learner]:
    learner = Learner(directory)
    async with serving(learner, Binding(), grace_s=0.5) as running:
        learner.target = running.address
        yield learner


def source(target: str) -> weights_pb2.WeightSource:
    return weights_pb2.WeightSource(target=target)


async def test_updates_are_adapters_from_the_learner_and_from_another_server(serve: Any, model_directory: Path) -> None:
    async with (
        serve(active=None, rollout=NETWORK) as first,
        serve(active=None, rollout=NETWORK) as second,
        learning(model_directory) as learner,
    ):
        for step in range(4):
            digest = learner.publish(step)
            answer = await first.update(step, source=source(learner.target))
            passed = await second.update(step, source=source(first.client.target))
            info = await second.client.get_info()
            assert answer.digest == passed.digest == info.active_digest == digest
            if step:
                assert answer.received_bytes == passed.received_bytes == learner.adapter_bytes
        assert learner.encodings[0] == {1} and learner.encodings[1:] == [{2, 5}] * 3


def _flipped(messages: list[bytes]) -> list[bytes]:
    first, chunk = Response.FromString(messages[0]), Response.FromString(messages[1])
    if not first.manifest.HasField("base"):
        return messages
    data = bytearray(chunk.chunk.data)
    data[2] ^= 64
    chunk.chunk.data = bytes(data)
    chunk.chunk.crc32 = crc32_of([memoryview(data)])
    return [messages[0], chunk.SerializeToString(), *messages[2:]]


def _other_base(messages: list[bytes]) -> list[bytes]:
    first = Response.FromString(messages[0])
    for spec in first.manifest.tensors:
        if spec.encoding == weights_pb2.TENSOR_ENCODING_LOW_RANK:
            spec.low_rank_base_digest = bytes(32)
    return [first.SerializeToString(), *messages[1:]]


@pytest.mark.parametrize("fault", [_flipped, _other_base])
async def test_adapters_that_do_not_fit_are_followed_by_the_whole_version(
    serve: Any, model_directory: Path, fault: Callable[[list[bytes]], list[bytes]]
) -> None:
    async with serve(active=None, rollout=NETWORK) as bench, learning(model_directory) as learner:
        learner.publish(0)
        await bench.update(0, source=source(learner.target))
        learner.fault = fault
        digest = learner.publish(1)
        answer = await bench.update(1, source=source(learner.target))
        assert answer.digest == digest
        assert learner.encodings == [{1}, {2, 5}, {1}]
        learner.fault = lambda messages: messages
        digest = learner.publish(2)
        answer = await bench.update(2, source=source(learner.target))
        assert answer.digest == digest and answer.received_bytes == learner.adapter_bytes


async def test_on_one_host_files_change_hands_and_show_w0(serve: Any, model_directory: Path) -> None:
    """A `WeightPublisher` as it is, which hands every version over: that is quicker than merging."""
    async with serve(active=None) as bench, learning(model_directory) as learner:
        learner.open = learner.publisher.open
        digests = []
        for step in range(3):
            digests.append(learner.publish(step))
            answer = await bench.update(step, source=source(learner.target))
            assert answer.digest == digests[-1]
            assert answer.received_bytes == 0
        del learner.open  # from here on over the network
        learner.publish(3)
        answer = await bench.update(3, source=source(learner.target))
        assert answer.received_bytes == learner.adapter_bytes


async def test_a_digest_of_another_length_is_refused(model_directory: Path) -> None:
    async with learning(model_directory) as learner, WeightsClient(learner.target) as client:
        learner.publish(0)
        with pytest.raises(RollwireError) as caught:
            [_ async for _ in client.fetch_weights(weights_pb2.FetchWeightsRequest(low_rank_bases=b"short"))]
    assert list(caught.value.fields) == ["low_rank_bases"]
