"""A server that ends a call while the client still sends: the client learns the server's reason, not its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from small_servers import FakeService

from rollwire.client import CoordinatorClient, LearnerClient, Reason, RollwireError
from rollwire.rpc.errors import precondition
from rollwire.serving.server import Binding, serving
from rollwire.v1 import coordinator_pb2, coordinator_pb2_grpc, learner_pb2, learner_pb2_grpc, trajectory_pb2

_CALLS = 40  # the failed write overtakes the status in about one call in twenty (Train), in most of them (streams)


class _Learner(FakeService, learner_pb2_grpc.LearnerServiceServicer):
    full_name = "rollwire.v1.LearnerService"
    add = staticmethod(learner_pb2_grpc.add_LearnerServiceServicer_to_server)

    async def Train(self, request_iterator: Any, context: Any) -> learner_pb2.TrainResponse:
        async for _ in request_iterator:
            raise precondition(Reason.WRONG_VERSION, "another version", step="3")
        raise AssertionError("nothing came")

    async def Score(self, request_iterator: Any, context: Any) -> AsyncIterator[learner_pb2.ScoreResponse]:
        async for _ in request_iterator:
            raise precondition(Reason.WRONG_VERSION, "another version", step="3")
            yield learner_pb2.ScoreResponse()


class _Coordinator(FakeService, coordinator_pb2_grpc.CoordinatorServiceServicer):
    full_name = "rollwire.v1.CoordinatorService"
    add = staticmethod(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server)

    async def SubmitTrajectories(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for _ in request_iterator:
            raise precondition(Reason.RUN_ENDED, "the run has ended")
            yield coordinator_pb2.SubmitTrajectoriesResponse()


def samples() -> list[learner_pb2.TrainSample]:
    """4 MiB: many messages, so that the client is still sending when the server has had enough."""
    return [learner_pb2.TrainSample(sample_id=f"s{i}", token_ids=[70_000] * 20_000) for i in range(70)]


async def submissions() -> AsyncIterator[coordinator_pb2.SubmitTrajectoriesRequest]:
    trajectory = trajectory_pb2.Trajectory(trajectory_id="x" * 60_000)
    for _ in range(64):
        yield coordinator_pb2.SubmitTrajectoriesRequest(trajectory=trajectory)


async def test_train_and_score_give_the_reason_of_a_refusal_in_mid_stream() -> None:
    async with serving(_Learner(), Binding()) as server, LearnerClient(server.address) as client:
        for _ in range(_CALLS):
            with pytest.raises(RollwireError) as trained:
                await client.train(learner_pb2.TrainHeader(), samples())
            with pytest.raises(RollwireError) as scored:
                async for _ in client.score(samples(), 1.0):
                    pass
            for found in (trained.value, scored.value):
                assert (found.code, found.reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.WRONG_VERSION)
                assert found.metadata == {"step": "3"}


async def test_pushers_learn_that_the_run_has_ended_while_they_send() -> None:
    async with serving(_Coordinator(), Binding()) as server, CoordinatorClient(server.address) as client:
        for _ in range(_CALLS):
            with pytest.raises(RollwireError) as caught:
                async for _ in client.submit_trajectories(submissions()):
                    pass
            assert (caught.value.code, caught.value.reason) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                Reason.RUN_ENDED,
            )
