"""Client of `LearnerService`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final, cast

import grpc.aio

from rollwire.client.base import ServiceClient
from rollwire.rpc.channel import open_channel
from rollwire.rpc.digests import samples_digest
from rollwire.rpc.first_status import FirstStatus
from rollwire.rpc.limits import CHUNK_BYTES
from rollwire.v1 import learner_pb2, learner_pb2_grpc

_SAMPLE_OVERHEAD_BYTES: Final = 64


class LearnerClient(ServiceClient):
    """Trains. All methods raise `RollwireError`."""

    service_name = "rollwire.v1.LearnerService"

    def __init__(self, target: str) -> None:
        super().__init__(target, open_channel(target))
        self._stub = learner_pb2_grpc.LearnerServiceStub(self._channel)

    async def get_info(self, *, timeout_s: float | None = None) -> learner_pb2.LearnerServiceGetInfoResponse:
        """Returns model and version."""
        request = learner_pb2.LearnerServiceGetInfoRequest()
        answer = await self._unary("GetInfo", self._stub.GetInfo, request, timeout_s)
        return cast(learner_pb2.LearnerServiceGetInfoResponse, answer)

    async def train(
        self,
        header: learner_pb2.TrainHeader,
        samples: Sequence[learner_pb2.TrainSample],
        *,
        timeout_s: float | None = None,
    ) -> learner_pb2.TrainResponse:
        """Runs one training step; safe to repeat after any error, the step is executed once."""
        call = self._stub.Train(_train_requests(header, samples), timeout=self._deadline("Train", timeout_s))
        status = FirstStatus(call)
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            raise status.decode(error) from error
        return cast(learner_pb2.TrainResponse, answer)

    def score(
        self,
        samples: Sequence[learner_pb2.TrainSample],
        temperature: float,
        *,
        model: learner_pb2.ScoredModel.ValueType = learner_pb2.SCORED_MODEL_POLICY,
        timeout_s: float | None = None,
    ) -> AsyncIterator[learner_pb2.ScoreResponse]:
        """Scores samples under the policy's present weights, the reference, or the critic."""
        requests = (
            learner_pb2.ScoreRequest(samples=part, temperature=temperature, model=model) for part in _parts(samples)
        )
        return self._stream("Score", self._stub.Score, requests, timeout_s)

    async def export(
        self, request: learner_pb2.ExportRequest, *, timeout_s: float | None = None
    ) -> learner_pb2.ExportResponse:
        """Writes a Hugging Face directory on the learner's host."""
        answer = await self._unary("Export", self._stub.Export, request, timeout_s)
        return cast(learner_pb2.ExportResponse, answer)

    async def save_checkpoint(
        self, request: learner_pb2.SaveCheckpointRequest, *, timeout_s: float | None = None
    ) -> learner_pb2.SaveCheckpointResponse:
        """Writes a checkpoint on the learner's host."""
        answer = await self._unary("SaveCheckpoint", self._stub.SaveCheckpoint, request, timeout_s)
        return cast(learner_pb2.SaveCheckpointResponse, answer)

    async def load_checkpoint(
        self, request: learner_pb2.LoadCheckpointRequest, *, timeout_s: float | None = None
    ) -> learner_pb2.LoadCheckpointResponse:
        """Goes back to a checkpoint on the learner's host."""
        answer = await self._unary("LoadCheckpoint", self._stub.LoadCheckpoint, request, timeout_s)
        return cast(learner_pb2.LoadCheckpointResponse, answer)

    async def sleep(
        self, request: learner_pb2.LearnerServiceSleepRequest, *, timeout_s: float | None = None
    ) -> learner_pb2.LearnerServiceSleepResponse:
        """Moves everything on the device to host memory."""
        answer = await self._unary("Sleep", self._stub.Sleep, request, timeout_s)
        return cast(learner_pb2.LearnerServiceSleepResponse, answer)

    async def wake(
        self, request: learner_pb2.LearnerServiceWakeRequest, *, timeout_s: float | None = None
    ) -> learner_pb2.LearnerServiceWakeResponse:
        """Moves everything back to the device."""
        answer = await self._unary("Wake", self._stub.Wake, request, timeout_s)
        return cast(learner_pb2.LearnerServiceWakeResponse, answer)


def _train_requests(
    header: learner_pb2.TrainHeader, samples: Sequence[learner_pb2.TrainSample]
) -> Iterator[learner_pb2.TrainRequest]:
    """Yields the messages of one training step: header, samples in pieces, commit."""
    yield learner_pb2.TrainRequest(header=header)
    for part in _parts(samples):
        yield learner_pb2.TrainRequest(samples=learner_pb2.TrainSamples(samples=part))
    commit = learner_pb2.TrainCommit(samples=len(samples), digest=samples_digest(samples))
    yield learner_pb2.TrainRequest(commit=commit)


def _parts(samples: Sequence[learner_pb2.TrainSample]) -> Iterator[list[learner_pb2.TrainSample]]:
    """Cuts samples into pieces that stay near `CHUNK_BYTES` on the wire; one sample is never cut."""
    part: list[learner_pb2.TrainSample] = []
    size = 0
    for sample in samples:
        bytes_here = sample.ByteSize() + _SAMPLE_OVERHEAD_BYTES
        if part and size + bytes_here > CHUNK_BYTES:
            yield part
            part, size = [], 0
        part.append(sample)
        size += bytes_here
    if part:
        yield part
