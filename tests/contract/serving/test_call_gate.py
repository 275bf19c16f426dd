"""What every server does to every call, against a real server on a loopback port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rollwire.client import CoordinatorClient, Reason, RollwireError
from rollwire.rpc.channel import open_channel
from rollwire.rpc.limits import INTERNAL_MESSAGE_BYTES
from rollwire.rpc.weight_relay import WeightRelay
from rollwire.serving.server import Binding, Readiness, RunningServer, ServeError, serve_forever, serving
from rollwire.serving.weights import WeightsServicer
from rollwire.v1 import coordinator_pb2, coordinator_pb2_grpc


class _Coordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """A small service: GetStatus answers, Stop raises what `cause` names."""

    full_name = "rollwire.v1.CoordinatorService"
    message_bytes = INTERNAL_MESSAGE_BYTES

    def __init__(self) -> None:
        self.running = 0
        self.finished = 0
        self.release = asyncio.Event()

    def register(self, server: grpc.aio.Server) -> None:
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(self, server)

    async def start(self, readiness: Readiness) -> None:
        await readiness.set(True)

    async def close(self) -> None:
        self.release.set()

    async def GetStatus(self, request, context):
        return coordinator_pb2.GetStatusResponse(run_id="r")

    async def Stop(self, request, context):
        if request.cause == "bug":
            raise KeyError("secret detail")
        if request.cause == "wait":
            self.running += 1
            await self.release.wait()
            self.finished += 1
            return coordinator_pb2.StopResponse()
        raise RollwireError(grpc.StatusCode.FAILED_PRECONDITION, Reason.WRONG_TURN, "no", metadata={"a": "b"})


class _Two(_Coordinator):
    """Serves weights beside its main service, as rollout servers and learners do."""

    def register(self, server: grpc.aio.Server) -> None:
        super().register(server)
        WeightsServicer(WeightRelay).register(server)


async def test_reflection_lists_every_service() -> None:
    async with (
        serving(_Two(), Binding(debug_services=True), grace_s=1) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        request = reflection_pb2.ServerReflectionRequest(list_services="*")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for response in stub.ServerReflectionInfo(iter([request]), timeout=10):
            names = {service.name for service in response.list_services_response.service}
        assert {"rollwire.v1.CoordinatorService", "rollwire.v1.WeightsService", "grpc.health.v1.Health"} <= names


class _Failing(_Coordinator):
    """Cannot go on soon after it has started."""

    async def start(self, readiness: Readiness) -> None:
        await readiness.set(True)
        await readiness.fail("the engine has died; restart the server")


async def test_a_service_that_cannot_go_on_ends_its_server() -> None:
    with pytest.raises(ServeError, match=r"^the engine has died; restart the server$"):
        async with asyncio.timeout(10):
            await serve_forever(_Failing(), Binding())


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    async with serving(_Coordinator(), Binding(), grace_s=5) as running:
        yield running


async def test_a_ready_service_answers(server: RunningServer) -> None:
    async with CoordinatorClient(server.address) as client:
        assert await client.wait_ready(5)
        assert (await client.get_status()).run_id == "r"


async def test_an_error_arrives_with_reason_and_metadata(server: RunningServer) -> None:
    async with CoordinatorClient(server.address) as client:
        with pytest.raises(RollwireError) as caught:
            await client.stop("x")
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.reason == Reason.WRONG_TURN
    assert caught.value.metadata == {"a": "b"}


async def test_a_bug_is_internal_and_shows_no_details(server: RunningServer) -> None:
    async with CoordinatorClient(server.address) as client:
        with pytest.raises(RollwireError) as caught:
            await client.stop("bug")
    assert caught.value.code is grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.message
    assert "incident-" in caught.value.message


async def test_a_call_without_deadline_is_refused(server: RunningServer) -> None:
    async with open_channel(server.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetStatus(coordinator_pb2.GetStatusRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "no deadline" in (caught.value.details() or "")


async def test_malformed_bytes_are_an_invalid_argument(server: RunningServer) -> None:
    async with open_channel(server.address) as channel:
        call = channel.unary_unary("/rollwire.v1.CoordinatorService/Stop")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\x0a\xff\xff", timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "rollwire.v1" in (caught.value.details() or "")


async def test_oversized_messages_are_refused_and_the_server_lives(server: RunningServer) -> None:
    async with CoordinatorClient(server.address) as client:
        with pytest.raises(RollwireError) as caught:
            await client.stop("x" * (INTERNAL_MESSAGE_BYTES + 1))
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await client.get_status()).run_id == "r"


async def test_draining_finishes_running_calls_and_refuses_new_ones() -> None:
    service = _Coordinator()
    async with serving(service, Binding(), grace_s=5) as running:
        client = CoordinatorClient(running.address)
        waiting = asyncio.create_task(client.stop("wait"))
        while service.running == 0:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.3, service.release.set)
    assert service.finished == 1
    await waiting
    with pytest.raises(RollwireError) as caught:
        await client.get_status(timeout_s=1)
    assert caught.value.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    await client.close()


async def test_ready_file_names_the_address(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    async with serving(_Coordinator(), Binding(ready_file=path)) as running:
        assert json.loads(path.read_text())["address"] == running.address


async def test_a_port_in_use_is_one_clear_line(server: RunningServer) -> None:
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(ServeError, match=f"cannot listen on 127.0.0.1:{port}: the port is in use"):
        async with serving(_Coordinator(), Binding(port=port)):
            pass


async def test_a_public_address_needs_insecure() -> None:
    with pytest.raises(ServeError, match="--insecure"):
        async with serving(_Coordinator(), Binding(host="0.0.0.0")):
            pass
