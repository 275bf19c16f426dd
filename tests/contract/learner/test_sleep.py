"""Sleep and Wake of the learner over gRPC, on CPU, where they move nothing but mean the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch

from rollwire.client.learner import LearnerClient
from rollwire.client.weights import WeightsClient
from rollwire.learner.device_memory import DeviceMemory
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import learner_pb2, trajectory_pb2, weights_pb2

from .conftest import Connect

Batch = Callable[..., list[learner_pb2.TrainSample]]
FENCE = trajectory_pb2.Fence(run_id="run", epoch=1)
SLEEP = learner_pb2.LearnerServiceSleepRequest(fence=FENCE)
WAKE = learner_pb2.LearnerServiceWakeRequest(fence=FENCE)


async def train(client: LearnerClient, samples: list[learner_pb2.TrainSample]) -> bytes:
    """Runs the next step and returns the digest of its weights."""
    version = (await client.get_info()).version
    request = learner_pb2.TrainHeader(base_version=version, optimizer_steps=2, fence=FENCE)
    request.loss.clip_low = request.loss.clip_high = 0.2
    return (await client.train(request, samples)).digest


async def test_sleep_and_wake_change_nothing_and_may_be_repeated(connect: Connect, batch: Batch) -> None:
    digests = []
    for sleeps in (False, True):
        async with connect() as client:
            await train(client, batch(0))
            if sleeps:
                for _ in range(2):
                    assert (await client.sleep(SLEEP)).freed_bytes == 0
                    assert (await client.get_info()).asleep
                for _ in range(2):
                    await client.wake(WAKE)
                    assert not (await client.get_info()).asleep
            digests.append(await train(client, batch(1)))
    assert digests[0] == digests[1]


async def test_what_computes_is_refused_while_asleep(connect: Connect, batch: Batch) -> None:
    async def score(client: LearnerClient) -> None:
        async for _ in client.score(batch(), 1.0):
            pass

    calls: dict[str, Any] = {
        "Train": lambda client: train(client, batch()),
        "Score": score,
        "SaveCheckpoint": lambda client: client.save_checkpoint(
            learner_pb2.SaveCheckpointRequest(fence=FENCE, name="a")
        ),
        "LoadCheckpoint": lambda client: client.load_checkpoint(
            learner_pb2.LoadCheckpointRequest(fence=FENCE, name="a")
        ),
    }
    async with connect() as client:
        await client.sleep(SLEEP)
        for name, call in calls.items():
            with pytest.raises(RollwireError, match=name) as caught:
                await call(client)
            assert (caught.value.reason, caught.value.code) == (Reason.ASLEEP, grpc.StatusCode.FAILED_PRECONDITION)


async def test_readers_are_served_while_asleep(connect: Connect, batch: Batch) -> None:
    async with connect() as client:
        digest = await train(client, batch())
        await client.sleep(SLEEP)
        async with WeightsClient(client.target) as reader:
            messages = [
                weights_pb2.FetchWeightsResponse.FromString(message) if isinstance(message, bytes) else message
                async for message in reader.fetch_weights(weights_pb2.FetchWeightsRequest(), timeout_s=10)
            ]
    assert messages[-1].commit.digest == digest


async def test_without_memory_the_learner_stays_asleep_and_wakes_later(
    connect: Connect, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = DeviceMemory._to_device

    def full(memory: DeviceMemory) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    async with connect() as client:
        await client.sleep(SLEEP)
        monkeypatch.setattr(DeviceMemory, "_to_device", full)
        with pytest.raises(RollwireError) as caught:
            await client.wake(WAKE)
        assert caught.value.reason == Reason.DEVICE_MEMORY_EXHAUSTED
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await client.get_info()).asleep

        monkeypatch.setattr(DeviceMemory, "_to_device", plain)
        await client.wake(WAKE)
        await train(client, batch())


async def test_a_sleep_that_failed_is_done_again_when_it_is_asked_for_again(
    connect: Connect, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or else a rollout server would be told that the device is free while it is not."""
    plain, calls = DeviceMemory._to_host, []

    def full(memory: DeviceMemory) -> None:
        raise MemoryError("no host memory")

    def counted(memory: DeviceMemory) -> None:
        calls.append(memory)
        plain(memory)

    async with connect() as client:
        monkeypatch.setattr(DeviceMemory, "_to_host", full)
        with pytest.raises(RollwireError) as caught:
            await client.sleep(SLEEP)
        assert caught.value.reason == Reason.INTERNAL
        assert (await client.get_info()).asleep, "some of its memory may be on the host"

        monkeypatch.setattr(DeviceMemory, "_to_host", counted)
        for _ in range(2):
            await client.sleep(SLEEP)
            assert len(calls) == 1
        await client.wake(WAKE)
        await train(client, batch())


async def test_an_export_is_written_while_asleep(connect: Connect) -> None:
    async with connect() as client:
        await client.sleep(SLEEP)
        exported = await client.export(learner_pb2.ExportRequest(fence=FENCE, name="asleep"))
        assert exported.bytes > 0


async def test_an_old_epoch_cannot_put_it_to_sleep(connect: Connect) -> None:
    async with connect() as client:
        newer = trajectory_pb2.Fence(run_id="run", epoch=2)
        await client.sleep(learner_pb2.LearnerServiceSleepRequest(fence=newer))
        with pytest.raises(RollwireError) as caught:
            await client.wake(WAKE)
        assert caught.value.reason == Reason.FENCED
        assert (await client.get_info()).asleep
