"""`SessionStream` over networks and servers that misbehave: calls are repeated, bounded, and fail one by one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from rollwire.client.call_book import MAX_SENDS, SMALL_MESSAGE_CALLS
from rollwire.client.environment import EnvironmentClient
from rollwire.client.environment_stream import MAX_STREAMS_IN_VAIN, SessionStream
from rollwire.compliance.proxy import tcp_proxy
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import environment_pb2 as pb
from rollwire.v1 import environment_pb2_grpc as pb_grpc

Opening = Callable[..., pb.OpenSessionRequest]
Talk = Callable[[AsyncIterator[pb.PlayRequest], Any], AsyncIterator[pb.PlayResponse]]
LIMIT_S = 60
LEFT = "<answer>Left</answer>"


class Scripted(pb_grpc.EnvironmentServiceServicer):
    """A server whose streams a test scripts; unary steps say so."""

    def __init__(self, talk: Talk | None) -> None:
        self.talk = talk
        self.streams = 0
        self.messages: list[pb.PlayRequest] = []

    async def Step(self, request: pb.StepRequest, context: Any) -> pb.StepResponse:
        return pb.StepResponse(observation=f"unary {request.turn}")

    async def Play(self, requests: AsyncIterator[pb.PlayRequest], context: Any) -> AsyncIterator[pb.PlayResponse]:
        self.streams += 1
        assert self.talk is not None

        async def noted() -> AsyncIterator[pb.PlayRequest]:
            async for request in requests:
                self.messages.append(request)
                yield request

        async for response in self.talk(noted(), context):
            yield response


class WithoutPlay(Scripted):
    """A server from before there was `Play`."""

    Play = pb_grpc.EnvironmentServiceServicer.Play  # type: ignore[assignment]


@asynccontextmanager
async def scripted(servicer: pb_grpc.EnvironmentServiceServicer) -> AsyncIterator[SessionStream]:
    server = grpc.aio.server()
    pb_grpc.add_EnvironmentServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with EnvironmentClient(address) as client, SessionStream(client) as stream:
            yield stream
    finally:
        await server.stop(0)


def answers(request: pb.PlayRequest) -> pb.PlayResponse:
    return pb.PlayResponse(
        replies=[
            pb.SessionReply(call_id=call.call_id, step=pb.StepResponse(observation=f"streamed {call.step.turn}"))
            for call in request.calls
        ]
    )


async def refusal(call: Any) -> RollwireError:
    with pytest.raises(RollwireError) as caught:
        await call
    return caught.value


async def test_calls_of_one_turn_of_the_loop_travel_together() -> None:
    async def talk(requests: Any, context: Any) -> AsyncIterator[pb.PlayResponse]:
        async for request in requests:
            yield answers(request)

    servicer = Scripted(talk)
    async with scripted(servicer) as stream:
        for _ in range(3):
            replies = await asyncio.gather(*(stream.step("s", turn, "a") for turn in range(64)))
            assert [reply.observation for reply in replies] == [f"streamed {turn}" for turn in range(64)]
        assert [len(message.calls) for message in servicer.messages] == [SMALL_MESSAGE_CALLS] * (
            3 * 64 // SMALL_MESSAGE_CALLS
        )
        assert servicer.streams == 1
        ids = [call.call_id for message in servicer.messages for call in message.calls]
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.OK])
async def test_what_a_lost_stream_left_open_is_asked_again(code: grpc.StatusCode) -> None:
    async def talk(requests: Any, context: Any) -> AsyncIterator[pb.PlayResponse]:
        async for request in requests:
            if servicer.streams == 1:  # answers half and goes
                reply = answers(request)
                del reply.replies[4:]
                yield reply
                if code is not grpc.StatusCode.OK:
                    await context.abort(code, "gone")
                return
            yield answers(request)

    servicer = Scripted(talk)
    async with scripted(servicer) as stream:
        replies = await asyncio.gather(*(stream.step("s", turn, "a") for turn in range(8)))
        assert [reply.observation for reply in replies] == [f"streamed {turn}" for turn in range(8)]
        assert [call.step.turn for call in servicer.messages[1].calls] == [4, 5, 6, 7]
        assert servicer.streams == 2


async def test_streams_in_vain_have_a_budget() -> None:
    async def talk(requests: Any, context: Any) -> AsyncIterator[pb.PlayResponse]:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "never")
        yield pb.PlayResponse()

    servicer = Scripted(talk)
    async with scripted(servicer) as stream:
        errors = await asyncio.gather(*(refusal(stream.step("s", turn, "a")) for turn in range(3)))
        assert {(error.code, error.reason) for error in errors} == {(grpc.StatusCode.UNAVAILABLE, Reason.TRANSPORT)}
        assert len({id(error) for error in errors}) == 3, "each caller gets an exception of its own"
        assert servicer.streams == MAX_STREAMS_IN_VAIN
        await refusal(stream.step("s", 0, "a"))
        assert servicer.streams == 2 * MAX_STREAMS_IN_VAIN, "a later call has a budget of its own"


async def test_one_call_that_is_never_answered_has_a_budget_too() -> None:
    """Each stream answers the others, so that streams are never in vain."""

    async def talk(requests: Any, context: Any) -> AsyncIterator[pb.PlayResponse]:
        async for request in requests:
            good = [call for call in request.calls if call.step.turn != 13]
            yield answers(pb.PlayRequest(calls=good))
            if len(good) < len(request.calls):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    servicer = Scripted(talk)
    async with scripted(servicer) as stream:
        bad = asyncio.create_task(refusal(stream.step("s", 13, "a")))
        turn = 100
        while not bad.done():
            assert (await stream.step("s", turn, "a")).observation == f"streamed {turn}"
            turn += 1
        assert (await bad).code is grpc.StatusCode.UNAVAILABLE
        sent = [call for message in servicer.messages for call in message.calls if call.step.turn == 13]
        assert len(sent) == MAX_SENDS


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.PERMISSION_DENIED]
)
async def test_calls_of_a_stream_that_was_refused_are_made_one_by_one(code: grpc.StatusCode) -> None:
    async def talk(requests: Any, context: Any) -> AsyncIterator[pb.PlayResponse]:
        async for _ in requests:
            await context.abort(code, "no")
            yield pb.PlayResponse()

    servicer = Scripted(talk)
    async with scripted(servicer) as stream:
        replies = await asyncio.gather(*(stream.step("s", turn, "a") for turn in range(3)))
        assert [reply.observation for reply in replies] == ["unary 0", "unary 1", "unary 2"]
        assert servicer.streams == 1


async def test_a_server_without_play_is_called_method_by_method() -> None:
    servicer = WithoutPlay(None)
    async with scripted(servicer) as stream:
        for _ in range(2):
            replies = await asyncio.gather(*(stream.step("s", turn, "a") for turn in range(3)))
            assert [reply.observation for reply in replies] == ["unary 0", "unary 1", "unary 2"]


def unknown_id(request: pb.PlayRequest) -> list[pb.PlayResponse]:
    return [pb.PlayResponse(replies=[pb.SessionReply(call_id=10**9, step=pb.StepResponse())]), answers(request)]


def twice(request: pb.PlayRequest) -> list[pb.PlayResponse]:
    return [answers(request), answers(request)]


def empty(request: pb.PlayRequest) -> list[pb.PlayResponse]:
    return [pb.PlayResponse(), answers(request)]


@pytest.mark.parametrize("replies", [unknown_id, twice, empty])
async def test_replies_that_nobody_waits_for_are_ignored(
    replies: Callable[[pb.PlayRequest], list[pb.PlayResponse]],
) -> None:
    async def talk(requests: Any, context: Any) -> AsyncIterator[pb.PlayResponse]:
        async for request in requests:
            for message in replies(request):
                yield message

    servicer = Scripted(talk)
    async with scripted(servicer) as stream:
        for turn in range(3):
            assert (await stream.step("s", turn, "a")).observation == f"streamed {turn}"
        assert servicer.streams == 1


async def test_a_flood_of_replies_that_nobody_waits_for_ends_the_stream() -> None:
    async def talk(requests: Any, context: Any) -> AsyncIterator[pb.PlayResponse]:
        async for request in requests:
            if servicer.streams > 1:
                yield answers(request)
            while servicer.streams == 1:
                yield pb.PlayResponse(replies=[pb.SessionReply(call_id=10**9 + n) for n in range(500)])

    servicer = Scripted(talk)
    async with scripted(servicer) as stream:
        assert (await stream.step("s", 5, "a", timeout_s=LIMIT_S)).observation == "streamed 5"
        assert servicer.streams == 2


@pytest.mark.parametrize("reply", [pb.SessionReply(open=pb.OpenSessionResponse(session_id="s")), pb.SessionReply()])
async def test_a_reply_of_another_kind_fails_its_call_alone(reply: pb.SessionReply) -> None:
    async def talk(requests: Any, context: Any) -> AsyncIterator[pb.PlayResponse]:
        async for request in requests:
            response = answers(request)
            response.replies[0].CopyFrom(reply)
            response.replies[0].call_id = request.calls[0].call_id
            yield response

    async with scripted(Scripted(talk)) as stream:
        bad, good = await asyncio.gather(refusal(stream.step("s", 0, "a")), stream.step("s", 1, "a"))
        assert (bad.code, bad.reason) == (grpc.StatusCode.INTERNAL, Reason.TRANSPORT)
        assert good.observation == "streamed 1"


@pytest.mark.parametrize("code", [0, 17, 2**32 - 1])
async def test_an_error_with_a_code_that_does_not_exist(code: int) -> None:
    async def talk(requests: Any, context: Any) -> AsyncIterator[pb.PlayResponse]:
        async for request in requests:
            error = pb.CallError(code=code)
            yield pb.PlayResponse(replies=[pb.SessionReply(call_id=request.calls[0].call_id, error=error)])

    async with scripted(Scripted(talk)) as stream:
        error = await refusal(stream.step("s", 0, "a"))
        assert (error.code, error.reason) == (grpc.StatusCode.UNKNOWN, Reason.TRANSPORT)


async def silent(requests: Any, context: Any) -> AsyncIterator[pb.PlayResponse]:
    async for _ in requests:
        pass
    yield pb.PlayResponse(replies=[pb.SessionReply()])


async def test_a_silent_server_is_not_waited_for_longer_than_the_deadline() -> None:
    async with scripted(Scripted(silent)) as stream:
        errors = await asyncio.gather(
            *(refusal(stream.step("s", 0, "a", timeout_s=timeout_s)) for timeout_s in (-1.0, 0.0, 0.05, 0.1))
        )
        assert {error.code for error in errors} == {grpc.StatusCode.DEADLINE_EXCEEDED}


async def test_callers_that_give_up_leave_nothing_waiting() -> None:
    servicer = Scripted(silent)
    async with scripted(servicer) as stream:
        tasks = [asyncio.create_task(stream.step("s", turn, "a")) for turn in range(5)]
        async with asyncio.timeout(LIMIT_S):
            while not servicer.messages:
                await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not stream._book.waiting


async def test_closing_fails_what_waits_and_what_comes_later() -> None:
    servicer = Scripted(silent)
    async with scripted(servicer) as stream:
        waiting = asyncio.create_task(refusal(stream.step("s", 0, "a")))
        async with asyncio.timeout(LIMIT_S):
            while not servicer.messages:
                await asyncio.sleep(0.01)
        await stream.close()
        assert (await waiting).code is grpc.StatusCode.CANCELLED
        assert (await refusal(stream.step("s", 1, "a"))).code is grpc.StatusCode.CANCELLED


async def test_sessions_go_on_while_a_proxy_cuts_the_stream(client: EnvironmentClient, opening: Opening) -> None:
    turns, sessions, cuts = 30, 16, 5
    async with (
        tcp_proxy(client.target) as proxy,
        EnvironmentClient(proxy.address) as through,
        SessionStream(through) as stream,
    ):
        played = 0

        async def play(seed: int) -> list[str]:
            nonlocal played
            opened = await stream.open_session(opening("Counting", seed=seed, limit=turns))
            seen = []
            for turn in range(turns):
                seen.append((await stream.step(opened.session_id, turn, "a")).observation)
                played += 1
            await stream.close_session(opened.session_id)
            return seen

        async def cut() -> None:
            for number in range(1, cuts + 1):
                while played < number * turns * sessions // (cuts + 1):
                    await asyncio.sleep(0)
                proxy.cut()

        *results, _ = await asyncio.gather(*(play(seed) for seed in range(sessions)), cut())
        # The environment counts: no turn was lost, and none was played twice.
        assert results == [[f"{turn + 1}: a" for turn in range(turns)]] * sessions
        assert (await client.list_environments()).open_sessions == 0


async def test_a_server_that_is_killed_and_one_that_takes_its_place(tmp_path: Path, opening: Opening) -> None:
    async def start(name: str, port: int) -> tuple[asyncio.subprocess.Process, str]:
        ready = tmp_path / name
        arguments = ["serve", "environment", "--port", str(port), "--ready-file", str(ready)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rollwire.cli.main", *arguments, stderr=asyncio.subprocess.DEVNULL, env=os.environ
        )
        async with asyncio.timeout(LIMIT_S):
            while not ready.exists():
                await asyncio.sleep(0.05)
        return process, json.loads(ready.read_text())["address"]

    process, address = await start("first", 0)
    try:
        async with EnvironmentClient(address) as client, SessionStream(client) as stream:
            opened = await stream.open_session(opening(max_steps=10**6))
            await stream.step(opened.session_id, 0, LEFT)
            process.send_signal(signal.SIGKILL)
            await process.wait()
            assert (await refusal(stream.step(opened.session_id, 1, LEFT))).code is grpc.StatusCode.UNAVAILABLE
            process, _ = await start("second", int(address.rpartition(":")[2]))
            error = await refusal(stream.step(opened.session_id, 1, LEFT))
            while error.code is grpc.StatusCode.UNAVAILABLE:  # until the channel has found the new server
                error = await refusal(stream.step(opened.session_id, 1, LEFT))
            assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, Reason.UNKNOWN_SESSION)
            assert (await stream.open_session(opening())).session_id
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_example_of_the_documentation(client: EnvironmentClient) -> None:
    page = (Path(__file__).parents[3] / "docs" / "wire.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    scope: dict[str, Any] = {}
    exec(compile(example, "docs/wire.md", "exec"), scope)
    scores = await scope["main"](client.target)
    assert len(scores) == 64 and set(scores) == {0.0, 1.0}
    assert (await client.list_environments()).open_sessions == 0
