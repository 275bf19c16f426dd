"""Providers that are cut off, hang, flood, lie or stop reading: nobody else notices, and nothing becomes a reward."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from types import ModuleType
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from rollwire.client import provider_stream, serve_environment_async
from rollwire.client.environment import EnvironmentClient
from rollwire.compliance.proxy import tcp_proxy
from rollwire.environment.service import EnvironmentServer
from rollwire.rpc.channel import open_environment_channel
from rollwire.rpc.errors import RollwireError, from_rpc_error
from rollwire.serving.config.models import RunConfig
from rollwire.serving.server import Binding, serving
from rollwire.v1 import environment_pb2 as pb
from rollwire.v1 import environment_pb2_grpc as pb_grpc
from tests.contract.providers.conftest import LIMIT_S, Provide, Serve, gone, offered, opening, until

LOST = pb.ENVIRONMENT_FAILURE_KIND_LOST
_TIME = Duration(seconds=60)


class RawProvider:
    """A provider whose every message a test writes itself."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, **message: Any) -> None:
        await self.call.write(pb.AttachRequest(**message))

    async def hello(self, **changes: Any) -> pb.AttachResponse:
        settings: dict[str, Any] = {
            "provider_id": "0123456789abcdef",
            "environments": [pb.EnvironmentDescription(tag="Raw", max_turns=9)],
            "capacity": 4,
            **changes,
        }
        await self.send(hello=pb.ProviderHello(**settings))
        return await self.call.read()

    async def next_call(self) -> pb.SessionCall:
        message = await self.call.read()
        assert message.WhichOneof("message") == "calls"
        (call,) = message.calls.calls
        return call

    async def reply(self, replies: Iterable[pb.SessionReply]) -> None:
        await self.send(replies=pb.ProviderReplies(replies=replies))

    async def play(self, client: EnvironmentClient) -> tuple[str, pb.SessionCall, asyncio.Task[pb.StepResponse]]:
        """Opens a session and begins a turn; returns its id, the provider's call and the caller's."""
        task = asyncio.create_task(client.open_session(opening("Raw")))
        call = await self.next_call()
        await self.reply(
            [pb.SessionReply(call_id=call.call_id, open=pb.OpenSessionResponse(session_id="mine", max_turns=9))]
        )
        opened = await task
        step = asyncio.create_task(client.step(opened.session_id, 0, "go"))
        return opened.session_id, await self.next_call(), step

    async def end(self) -> RollwireError:
        """Reads to the end of the stream; returns the error that ended it."""
        async with asyncio.timeout(LIMIT_S):
            try:
                while await self.call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError as error:
                return from_rpc_error(error)
        raise AssertionError("the stream ended well")


@asynccontextmanager
async def raw_provider(target: str) -> AsyncIterator[RawProvider]:
    async with open_environment_channel(target) as channel:
        call = pb_grpc.EnvironmentServiceStub(channel).Attach()
        yield RawProvider(call)
        call.cancel()


async def test_a_cut_connection_loses_nothing_when_the_provider_returns_in_time(
    serve: Serve, provide: Provide, games: ModuleType
) -> None:
    async with (
        serve(lease_s=60, step_timeout_s=60) as client,
        tcp_proxy(client.target) as proxy,
        provide(proxy.address, {"Count": games.Counting}),
    ):
        await offered(client, "Count")
        opened = await client.open_session(opening("Count"))
        await client.step(opened.session_id, 0, "a")
        playing = asyncio.create_task(client.step(opened.session_id, 1, "hang"))
        await until(lambda: "step 2" in games.log)
        proxy.open = False
        proxy.cut()
        games.release.set()  # the turn ends while there is no connection
        with pytest.raises(RollwireError) as away:
            async with asyncio.timeout(LIMIT_S):
                while True:
                    await client.close_session((await client.open_session(opening("Count", seed=2))).session_id)
        assert away.value.reason == "SESSIONS_EXHAUSTED"
        proxy.open = True
        assert (await playing).observation == "2: hang"
        assert (await client.step(opened.session_id, 2, "c")).observation == "3: c"
    assert games.log.count("step 2") == 1
    assert games.log.count("reset 1") == 1


async def test_a_provider_that_returns_after_the_lease_closes_what_it_had(
    serve: Serve, provide: Provide, games: ModuleType
) -> None:
    async with (
        serve(lease_s=1) as client,
        tcp_proxy(client.target) as proxy,
        provide(proxy.address, {"Count": games.Counting}),
    ):
        await offered(client, "Count")
        opened = await client.open_session(opening("Count"))
        proxy.open = False
        proxy.cut()
        await gone(client, "Count")
        reply = await client.step(opened.session_id, 0, "a")
        assert (reply.failure.kind, reply.reward) == (LOST, 0)
        assert "did not come back within 1 s" in reply.failure.message
        proxy.open = True
        await offered(client, "Count")
        await until(lambda: "closed at 0" in games.log)
        assert (await client.open_session(opening("Count", seed=3))).observation == "seed 3"


async def test_the_server_restarts(serve: Serve, provide: Provide, games: ModuleType) -> None:
    async with (
        serve() as client,
        tcp_proxy(client.target) as proxy,
        provide(proxy.address, {"Count": games.Counting}),
    ):
        await offered(client, "Count")
        await client.open_session(opening("Count"))
        async with serve() as other:
            proxy.target = other.target
            proxy.cut()
            await offered(other, "Count")
            await until(lambda: "closed at 0" in games.log)  # the new server does not know it
            assert (await other.open_session(opening("Count", seed=4))).observation == "seed 4"
            proxy.cut()


async def test_two_programs_with_one_name(serve: Serve) -> None:
    async with serve() as client, raw_provider(client.target) as first, raw_provider(client.target) as second:
        assert (await first.hello()).welcome.lease.seconds == 5
        _, call, step = await first.play(client)
        assert (await second.hello(session_ids=["mine"])).HasField("welcome")
        assert (await first.end()).reason == "PROVIDER_REPLACED"
        again = await second.next_call()
        assert again == call
        await second.reply([pb.SessionReply(call_id=call.call_id, step=pb.StepResponse(reward=2.0))])
        assert (await step).reward == 2.0


@pytest.mark.parametrize(
    ("replies", "problem"),
    [
        (lambda call: [pb.SessionReply(call_id=call.call_id + 77)], "which no call had"),
        (lambda call: [pb.SessionReply(call_id=call.call_id)] * 100, "more replies than calls"),
    ],
)
async def test_garbage_and_floods_throw_the_provider_out(serve: Serve, replies: Any, problem: str) -> None:
    async with serve() as client, raw_provider(client.target) as provider:
        await provider.hello()
        _, call, step = await provider.play(client)
        await provider.reply(replies(call))
        ended = await provider.end()
        assert ended.reason == "INVALID_FIELD"
        assert problem in ended.message
        reply = await step
        assert reply.failure.kind in (LOST, pb.ENVIRONMENT_FAILURE_KIND_INVALID_RESULT)
        assert reply.reward == 0
        await gone(client, "Raw")
        assert (await client.open_session(opening("FrozenLake"))).observation


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"hello": pb.ProviderHello()}, "a second hello"),
        ({}, "an empty message"),
        ({"capacity": pb.ProviderCapacity(capacity=1 << 20)}, "capacity is 1048576"),
    ],
)
async def test_messages_outside_the_contract(serve: Serve, message: dict[str, Any], problem: str) -> None:
    async with serve() as client, raw_provider(client.target) as provider:
        await provider.hello()
        await provider.send(**message)
        assert problem in (await provider.end()).message


async def test_a_stream_without_hello(serve: Serve) -> None:
    async with serve() as client, raw_provider(client.target) as provider:
        await provider.send(drain=pb.ProviderDrain())
        assert "hello, as the first message" in (await provider.end()).message


async def test_bytes_that_are_no_message(serve: Serve) -> None:
    async with serve() as client, grpc.aio.insecure_channel(client.target) as channel:
        call = channel.stream_stream("/rollwire.v1.EnvironmentService/Attach")()
        await call.write(b"\xff\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert from_rpc_error(refused.value).reason == "MALFORMED_MESSAGE"


async def test_a_provider_that_never_answers(serve: Serve) -> None:
    async with serve(step_timeout_s=0.5) as client, raw_provider(client.target) as provider:
        await provider.hello()
        _, _, step = await provider.play(client)
        assert (await step).failure.kind == pb.ENVIRONMENT_FAILURE_KIND_TIMEOUT


async def test_a_provider_that_stops_reading_is_cut(serve: Serve) -> None:
    async with serve(lease_s=1, step_timeout_s=120) as client, raw_provider(client.target) as provider:
        await provider.hello(capacity=64)
        sessions = []
        for index in range(32):
            task = asyncio.create_task(client.open_session(opening("Raw")))
            call = await provider.next_call()
            response = pb.OpenSessionResponse(session_id=f"s{index}", max_turns=9)
            await provider.reply([pb.SessionReply(call_id=call.call_id, open=response)])
            sessions.append((await task).session_id)
        # From here on nothing is read: 32 MiB do not fit into the windows of HTTP/2.
        steps = [client.step(session_id, 0, "x" * (1 << 20), timeout_s=LIMIT_S) for session_id in sessions]
        replies = await asyncio.gather(*steps)
        assert {reply.failure.kind for reply in replies} == {LOST}
        await gone(client, "Raw")
        assert (await client.open_session(opening("FrozenLake"))).observation


async def test_an_environment_that_hangs_takes_its_thread_from_the_capacity(
    serve: Serve, provide: Provide, games: ModuleType
) -> None:
    async with serve(step_timeout_s=0.5) as client, provide(client.target, {"Count": games.Counting}, capacity=2):
        await offered(client, "Count")
        hanging = await client.open_session(opening("Count"))
        assert (await client.step(hanging.session_id, 0, "hang")).failure.kind == pb.ENVIRONMENT_FAILURE_KIND_TIMEOUT
        await client.close_session(hanging.session_id)

        async def one_is_left() -> bool:
            first = await client.open_session(opening("Count"))
            try:
                await client.close_session((await client.open_session(opening("Count"))).session_id)
            except RollwireError as error:
                return error.reason == "SESSIONS_EXHAUSTED"
            finally:
                await client.close_session(first.session_id)
            return False

        await until(one_is_left)
        games.release.set()


async def test_an_environment_that_fails_to_start_is_closed(serve: Serve, provide: Provide, games: ModuleType) -> None:
    async with serve() as client, provide(client.target, {"Failing": games.Failing}):
        await offered(client, "Failing")
        opened = await client.open_session(opening("Failing", seed=7))
        assert opened.failure.type == "ZeroDivisionError"
        await until(lambda: games.log.count("closed at 7") == 1)


async def test_what_was_given_up_is_closed_when_it_comes_back(
    serve: Serve, provide: Provide, games: ModuleType
) -> None:
    async with serve(step_timeout_s=1) as client, provide(client.target, {"Failing": games.Failing}):
        await offered(client, "Failing")
        opened = await client.open_session(opening("Failing", seed=7, how="hang"))
        assert opened.failure.kind == pb.ENVIRONMENT_FAILURE_KIND_TIMEOUT
        playing = await client.open_session(opening("Failing", seed=20, how="turn"))
        reply = await client.step(playing.session_id, 0, "hang")
        assert reply.failure.kind == pb.ENVIRONMENT_FAILURE_KIND_TIMEOUT
        await client.close_session(playing.session_id)
        assert not {"closed at 7", "closed at 20", "closed at 21"} & set(games.log)
        games.release.set()
        await until(lambda: {"closed at 7", "closed at 21"} <= set(games.log))
        assert games.log.count("closed at 7") == games.log.count("closed at 21") == 1


async def test_a_provider_that_gives_up_closes_its_sessions(serve: Serve, games: ModuleType) -> None:
    async with serve() as client, tcp_proxy(client.target) as proxy:
        provider = asyncio.create_task(
            serve_environment_async(proxy.address, {"Count": games.Counting}, give_up_after_s=0)
        )
        await offered(client, "Count")
        opened = await client.open_session(opening("Count"))
        await client.step(opened.session_id, 0, "a")
        proxy.open = False
        proxy.cut()
        with pytest.raises(RollwireError, match="no environment server takes this provider"):
            async with asyncio.timeout(LIMIT_S):
                await provider
        assert "closed at 1" in games.log


async def test_a_server_that_takes_no_providers(serve: Serve, games: ModuleType) -> None:
    async with serve(max_providers=0) as client:
        with pytest.raises(RollwireError, match="takes 0 providers"):
            await serve_environment_async(client.target, {"Count": games.Counting}, give_up_after_s=0)


class NeverEnding(pb_grpc.EnvironmentServiceServicer):
    """Welcomes a provider and opens a session, then does nothing more: a server that was stopped, or a network cut."""

    async def Attach(self, requests: AsyncIterator[pb.AttachRequest], context: Any) -> AsyncIterator[pb.AttachResponse]:
        first = await anext(requests)
        welcome = pb.AttachResponse(welcome=pb.ProviderWelcome())
        welcome.welcome.lease.FromSeconds(60)
        yield welcome
        opening = pb.OpenSessionRequest(request_id="one", environment_tag=first.hello.environments[0].tag)
        yield pb.AttachResponse(calls=pb.ProviderCalls(calls=[pb.SessionCall(call_id=1, timeout=_TIME, open=opening)]))
        await asyncio.Event().wait()


async def test_a_provider_stops_although_its_server_does_not_answer(
    games: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_stream, "_END_TIMEOUT_S", 0.1)
    server = grpc.aio.server()
    pb_grpc.add_EnvironmentServiceServicer_to_server(NeverEnding(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stop = asyncio.Event()
    target, provided = f"127.0.0.1:{port}", {"Count": games.Counting}
    serving_it = asyncio.create_task(serve_environment_async(target, provided, stop=stop, drain_timeout_s=0))
    try:
        await until(lambda: "reset 0" in games.log)
        stop.set()
        async with asyncio.timeout(LIMIT_S):
            await serving_it
        assert games.log.count("closed at 0") == 2  # the sample and the session
    finally:
        await server.stop(0)


async def test_a_server_that_shuts_down_does_not_wait_for_its_providers(provide: Provide, games: ModuleType) -> None:
    async with AsyncExitStack() as server, asyncio.timeout(LIMIT_S):
        grace_s = 10 * LIMIT_S
        running = await server.enter_async_context(serving(EnvironmentServer(RunConfig()), Binding(), grace_s=grace_s))
        async with (
            provide(running.address, {"Count": games.Counting}),
            raw_provider(running.address) as raw,
            EnvironmentClient(running.address) as client,
        ):
            await raw.hello()
            await offered(client, "Count", "Raw")
            await client.open_session(opening("Count"))
            reading = asyncio.create_task(raw.call.read())
            await server.aclose()
            assert (await reading).HasField("drain")
