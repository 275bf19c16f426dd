"""The stream to an environment server fails in every way: episodes go on, or fail with a reason; none is lost."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from rollwire.compliance.proxy import TcpProxy, tcp_proxy
from rollwire.environment.service import EnvironmentServer
from rollwire.serving.config.models import RunConfig
from rollwire.serving.server import Binding, serving
from rollwire.v1 import environment_pb2 as pb
from rollwire.v1 import environment_pb2_grpc as pb_grpc
from rollwire.v1 import rollout_pb2, trajectory_pb2

LIMIT_S = 60
EPISODES = 4
GROUP: dict[str, Any] = {"episodes": EPISODES, "environment_tag": "FrozenLake"}
LOST = trajectory_pb2.FAILURE_REASON_ENVIRONMENT_LOST
ERROR = trajectory_pb2.FAILURE_REASON_ENVIRONMENT_ERROR
TIMEOUT = trajectory_pb2.FAILURE_REASON_ENVIRONMENT_TIMEOUT


def outcome(results: list[rollout_pb2.RunGroupResponse]) -> tuple[int, list[int]]:
    """Returns the number of trajectories and the reasons of failures, which together are what was requested."""
    completed = [result for result in results if result.HasField("trajectory")]
    failed = [result.failure.reason for result in results if result.HasField("failure")]
    assert len(completed) + len(failed) == EPISODES
    return len(completed), failed


class Watched(EnvironmentServer):
    """The real server, with an ear at its streams and a hook at its turns."""

    def __init__(self) -> None:
        super().__init__(RunConfig())
        self.streams = 0
        self.steps = 0
        self.on_step: Callable[[int], None] = lambda steps: None

    async def Play(self, requests: Any, context: Any) -> AsyncIterator[pb.PlayResponse]:
        self.streams += 1

        async def noted() -> AsyncIterator[pb.PlayRequest]:
            async for request in requests:
                for call in request.calls:
                    if call.HasField("step"):
                        self.steps += 1
                        self.on_step(self.steps)
                yield request

        async for message in super().Play(noted(), context):
            yield message


async def test_all_sessions_share_one_stream(serve: Any) -> None:
    server = Watched()
    async with serving(server, Binding(), grace_s=0.2) as lake, serve() as bench:
        results = await bench.play(environment_targets=[lake.address], **GROUP)
        assert outcome(results) == (EPISODES, [])
        assert server.streams == 1 and server.steps == sum(len(item.trajectory.turns) for item in results)


async def test_a_stream_that_is_cut_again_and_again_costs_no_episode(serve: Any) -> None:
    server = Watched()
    async with (
        serving(server, Binding(), grace_s=0.2) as lake,
        tcp_proxy(lake.address) as proxy,
        serve() as bench,
    ):
        whole = await bench.play(environment_targets=[lake.address], **GROUP)
        server.streams = server.steps = 0

        def cut(steps: int) -> None:
            if steps in (3, 9, 15):
                proxy.cut()

        server.on_step = cut
        results = await bench.play(environment_targets=[proxy.address], timeout_s=LIMIT_S, **GROUP)
        assert outcome(results) == (EPISODES, [])
        assert server.streams > 1
        # The cuts leave no trace: the same turns were played, each once.
        assert scores(results) == scores(whole)


def scores(results: list[rollout_pb2.RunGroupResponse]) -> list[tuple[int, float, list[int]]]:
    played = sorted((result.trajectory for result in results), key=lambda trajectory: trajectory.episode_index)
    return [(len(item.turns), item.score, list(item.sequences[0].token_ids)) for item in played]


async def test_a_network_that_stays_away_fails_all_episodes(serve: Any) -> None:
    server = Watched()
    async with (
        serving(server, Binding(), grace_s=0.2) as lake,
        tcp_proxy(lake.address) as proxy,
        serve() as bench,
    ):
        server.on_step = lambda steps: shut(proxy) if steps == 5 else None
        results = await bench.play(environment_targets=[proxy.address], timeout_s=LIMIT_S, **GROUP)
        assert outcome(results) == (0, [LOST] * EPISODES)
        proxy.open = True
        server.on_step = lambda steps: None
        assert outcome(await bench.play(environment_targets=[lake.address], **GROUP)) == (EPISODES, [])


def shut(proxy: TcpProxy) -> None:
    proxy.open = False
    proxy.cut()


async def test_a_server_that_is_killed_in_the_middle(serve: Any, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollwire.cli.main", "serve", "environment", "--ready-file", str(ready),
        stderr=asyncio.subprocess.DEVNULL, env=os.environ,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            while not ready.exists():
                await asyncio.sleep(0.05)
        target = json.loads(ready.read_text())["address"]
        async with serve() as bench:
            assert outcome(await bench.play(environment_targets=[target], **GROUP)) == (EPISODES, [])
            process.send_signal(signal.SIGSTOP)  # nothing can be answered between here and the end
            request = bench.group(environment_targets=[target], **GROUP)
            playing = asyncio.create_task(collect(bench.client.run_group(request, timeout_s=LIMIT_S)))
            pool = bench.server._servicer.parts.pool
            async with asyncio.timeout(LIMIT_S):
                while pool.server(target).sessions < EPISODES:
                    await asyncio.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            assert outcome(await playing) == (0, [LOST] * EPISODES)
            assert (await bench.client.get_info()).running_episodes == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def collect(results: AsyncIterator[Any]) -> list[Any]:
    return [result async for result in results]


class Liar(pb_grpc.EnvironmentServiceServicer):
    """Opens sessions well and answers steps as a test says."""

    def __init__(self, lie: Callable[[pb.SessionCall], list[pb.SessionReply]]) -> None:
        self.lie = lie

    async def ListEnvironments(self, request: Any, context: Any) -> pb.ListEnvironmentsResponse:
        lake = pb.EnvironmentDescription(tag="FrozenLake", max_turns=10)
        return pb.ListEnvironmentsResponse(environments=[lake], session_capacity=64)

    async def Play(self, requests: Any, context: Any) -> AsyncIterator[pb.PlayResponse]:
        async for request in requests:
            for call in request.calls:
                replies = self.lie(call) if call.HasField("step") else [honest(call)]
                for start in range(0, len(replies), 500):
                    yield pb.PlayResponse(replies=replies[start : start + 500])


def honest(call: pb.SessionCall) -> pb.SessionReply:
    kind = call.WhichOneof("call")
    assert kind is not None
    reply = pb.SessionReply(call_id=call.call_id)
    getattr(reply, kind).SetInParent()
    if kind == "open":
        reply.open.session_id, reply.open.observation, reply.open.max_turns = call.open.request_id, "____", 10
    if kind == "step":
        reply.step.observation, reply.step.terminated = "____", call.step.turn >= 2
    return reply


def stepped(**step: Any) -> Callable[[pb.SessionCall], list[pb.SessionReply]]:
    return lambda call: [pb.SessionReply(call_id=call.call_id, step=pb.StepResponse(**step))]


def unknown(call: pb.SessionCall) -> list[pb.SessionReply]:
    return [pb.SessionReply(call_id=call.call_id + 10**6, step=pb.StepResponse(reward=9.0))]


def unknown_and_true(call: pb.SessionCall) -> list[pb.SessionReply]:
    return [*unknown(call), honest(call), honest(call)]


def flood(call: pb.SessionCall) -> list[pb.SessionReply]:
    return unknown(call) * 3000


def another_kind(call: pb.SessionCall) -> list[pb.SessionReply]:
    return [pb.SessionReply(call_id=call.call_id, open=pb.OpenSessionResponse(session_id="x"))]


@asynccontextmanager
async def lying(lie: Callable[[pb.SessionCall], list[pb.SessionReply]]) -> AsyncIterator[str]:
    server = grpc.aio.server()
    pb_grpc.add_EnvironmentServiceServicer_to_server(Liar(lie), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (unknown_and_true, None),
        (stepped(reward=math.nan), ERROR),
        (stepped(reward=1.0, metrics={"a b": 1.0}), ERROR),
        (stepped(failure=pb.EnvironmentFailure(kind=pb.ENVIRONMENT_FAILURE_KIND_LOST)), LOST),
        (another_kind, LOST),
        (flood, LOST),
    ],
    ids=["unknown ids", "nan", "metric", "lost", "kind", "flood"],
)
async def test_servers_that_lie(serve: Any, lie: Any, reason: int | None) -> None:
    async with lying(lie) as target, serve() as bench:
        results = await bench.play(environment_targets=[target], timeout_s=LIMIT_S, **GROUP)
        assert outcome(results) == ((EPISODES, []) if reason is None else (0, [reason] * EPISODES))


async def test_replies_that_never_come(serve: Any) -> None:
    async with lying(unknown) as target, serve() as bench:
        bench.server._opener._step_timeout_s = 1.0
        results = await bench.play(environment_targets=[target], timeout_s=LIMIT_S, **GROUP)
        assert outcome(results) == (0, [TIMEOUT] * EPISODES)
