"""The `Play` stream as any client may use it: order, batches, deadlines, limits, cuts and the end of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from rollwire.client.environment import EnvironmentClient
from rollwire.environment.service import EnvironmentServer
from rollwire.rpc.channel import open_environment_channel
from rollwire.rpc.errors import Reason, RollwireError, from_rpc_error
from rollwire.rpc.limits import ENVIRONMENT_MESSAGE_BYTES, MAX_UNANSWERED_CALLS
from rollwire.serving.config.models import RunConfig
from rollwire.serving.server import Binding, serving
from rollwire.v1 import environment_pb2 as pb
from rollwire.v1 import environment_pb2_grpc as pb_grpc

Opening = Callable[..., pb.OpenSessionRequest]
LIMIT_S = 60
LEFT = "<answer>Left</answer>"


class RawStream:
    """A stream whose every message a test writes itself."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, *calls: pb.SessionCall) -> None:
        await self.call.write(pb.PlayRequest(calls=calls))

    async def read(self) -> pb.PlayResponse:
        async with asyncio.timeout(LIMIT_S):
            message: pb.PlayResponse = await self.call.read()
        return message

    async def replies(self, count: int) -> dict[int, pb.SessionReply]:
        found: dict[int, pb.SessionReply] = {}
        while len(found) < count:
            message = await self.read()
            assert message is not grpc.aio.EOF and message.replies
            for reply in message.replies:
                assert reply.call_id not in found, "one reply for each call"
                found[reply.call_id] = reply
        return found

    async def ask(self, call_id: int, **call: Any) -> pb.SessionReply:
        await self.send(session_call(call_id, **call))
        return (await self.replies(1))[call_id]

    async def refused(self) -> RollwireError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.read()
        return from_rpc_error(caught.value)


def session_call(call_id: int, timeout_s: float = 30, **call: Any) -> pb.SessionCall:
    made = pb.SessionCall(call_id=call_id, **call)
    made.timeout.FromNanoseconds(int(timeout_s * 1e9))
    return made


@asynccontextmanager
async def raw_stream(target: str) -> AsyncIterator[RawStream]:
    async with open_environment_channel(target) as channel:
        call = pb_grpc.EnvironmentServiceStub(channel).Play()
        try:
            yield RawStream(call)
        finally:
            call.cancel()


@pytest.fixture
async def stream(client: EnvironmentClient) -> AsyncIterator[RawStream]:
    async with raw_stream(client.target) as stream:
        yield stream


async def test_all_calls_of_a_session(client: EnvironmentClient, stream: RawStream, opening: Opening) -> None:
    opened = (await stream.ask(7, open=opening("Counting", limit=2))).open
    assert (opened.observation, opened.instructions, opened.suffix, opened.max_turns) == ("seed 42", "count", "?", 2)
    step = pb.StepRequest(session_id=opened.session_id, turn=0, action="hello")
    played = (await stream.ask(7, step=step)).step
    assert (played.observation, played.reward, played.metrics["turn"]) == ("1: hello", 0.25, 1.0)
    assert (await stream.ask(0, step=step)).step == played == await client.step(opened.session_id, 0, "hello")
    renewed = (await stream.ask(2**64 - 1, renew=pb.RenewSessionRequest(session_id=opened.session_id))).renew
    assert renewed.lease.seconds == 60
    drawing = pb.RenderRequest(session_id=opened.session_id, format=pb.RENDER_FORMAT_TEXT)
    assert (await stream.ask(3, render=drawing)).render.text == "count 1"
    closed = await stream.ask(4, close=pb.CloseSessionRequest(session_id=opened.session_id))
    assert closed.WhichOneof("reply") == "close"
    assert (await stream.ask(5, step=step)).error.reason == Reason.UNKNOWN_SESSION


async def test_a_message_of_built_in_turns_is_answered_by_one_message(
    client: EnvironmentClient, stream: RawStream, opening: Opening
) -> None:
    opened = await asyncio.gather(*(client.open_session(opening(seed=seed)) for seed in range(64)))
    steps = [pb.StepRequest(session_id=item.session_id, action=LEFT) for item in opened]
    await stream.send(*(session_call(number, step=step) for number, step in enumerate(steps)))
    message = await stream.read()
    assert [reply.call_id for reply in message.replies] == list(range(64))
    assert all(reply.HasField("step") for reply in message.replies)


async def test_a_slow_call_delays_no_other(serve: Any, opening: Opening, troublesome: Any) -> None:
    patient = {"Troublesome": {"type": "troublesome:Troublesome", "isolation": "thread", "step_timeout_s": LIMIT_S}}
    async with serve(definitions=patient) as client, raw_stream(client.target) as stream:
        slow = (await stream.ask(1, open=opening("Troublesome"))).open
        quick = (await stream.ask(1, open=opening())).open
        hang = pb.StepRequest(session_id=slow.session_id, action="hang")
        await stream.send(
            session_call(1, step=hang), session_call(2, step=pb.StepRequest(session_id=quick.session_id, action=LEFT))
        )
        assert list(await stream.replies(1)) == [2]
        # A repeat while it is being played shares the outcome.
        await stream.send(session_call(3, step=hang))
        troublesome.release.set()
        replies = await stream.replies(2)
        assert replies[1].step == replies[3].step and replies[1].step.observation == "1: hang"


async def test_a_call_has_its_own_deadline_and_its_repeat_finds_the_outcome(
    serve: Any, opening: Opening, troublesome: Any
) -> None:
    patient = {"Troublesome": {"type": "troublesome:Troublesome", "isolation": "thread", "step_timeout_s": LIMIT_S}}
    async with serve(definitions=patient) as client, raw_stream(client.target) as stream:
        slow = (await stream.ask(1, open=opening("Troublesome"))).open
        hang = pb.StepRequest(session_id=slow.session_id, action="hang")
        await stream.send(session_call(1, timeout_s=0.01, step=hang))
        error = (await stream.replies(1))[1].error
        assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED.value[0], "")
        troublesome.release.set()
        assert (await stream.ask(1, step=hang)).step.observation == "1: hang"


@pytest.mark.parametrize(("seconds", "nanos"), [(0, 0), (-1, 0), (0, -1), (3600, 1), (3601, 0), (1, 10**9), (2**62, 0)])
async def test_timeouts_outside_their_range(stream: RawStream, opening: Opening, seconds: int, nanos: int) -> None:
    call = pb.SessionCall(call_id=1, timeout=Duration(seconds=seconds, nanos=nanos), open=opening())
    await stream.send(call)
    error = (await stream.replies(1))[1].error
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], Reason.INVALID_FIELD)
    assert error.metadata["field"] == "timeout"
    assert (await stream.ask(1, open=opening())).HasField("open")


async def test_a_call_without_timeout_and_one_without_a_question(stream: RawStream, opening: Opening) -> None:
    await stream.send(pb.SessionCall(call_id=1, open=opening()), session_call(2))
    replies = await stream.replies(2)
    assert replies[1].error.reason == Reason.DEADLINE_REQUIRED
    assert (replies[2].error.reason, replies[2].error.metadata["field"]) == (Reason.INVALID_FIELD, "call")


async def test_messages_that_end_the_stream(client: EnvironmentClient, opening: Opening, troublesome: Any) -> None:
    opened = await client.open_session(opening("Troublesome"))
    hang = pb.StepRequest(session_id=opened.session_id, action="hang")
    twice = pb.PlayRequest(calls=[session_call(5, step=hang), session_call(5, step=hang)])
    for message, field in ((pb.PlayRequest(), "calls"), (twice, "calls.call_id")):
        async with raw_stream(client.target) as stream:
            await stream.call.write(message)
            error = await stream.refused()
            assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD)
            assert list(error.fields) == [field]
    troublesome.release.set()
    assert (await client.step(opened.session_id, 0, "hang")).observation == "1: hang"


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05ab", b"\x0a\x04\x22\x02\x0a\xff"], ids=["tag", "length", "inner"])
async def test_bytes_that_are_no_message(client: EnvironmentClient, data: bytes) -> None:
    async with open_environment_channel(client.target) as channel:
        call = channel.stream_stream("/rollwire.v1.EnvironmentService/Play")()
        await call.write(data)
        error = await RawStream(call).refused()
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.MALFORMED_MESSAGE)


async def test_a_message_above_the_limit_cuts_the_stream_and_no_session(
    client: EnvironmentClient, opening: Opening
) -> None:
    opened = await client.open_session(opening())
    options = [("grpc.max_send_message_length", 16 << 20)]
    async with grpc.aio.insecure_channel(client.target, options=options) as channel:
        stream = RawStream(pb_grpc.EnvironmentServiceStub(channel).Play())
        await stream.send(session_call(1, step=pb.StepRequest(session_id=opened.session_id, action="x" * 10_000_000)))
        assert (await stream.refused()).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not (await client.step(opened.session_id, 0, LEFT)).HasField("failure")


async def test_a_cut_ends_no_session(client: EnvironmentClient, opening: Opening) -> None:
    async with raw_stream(client.target) as stream:
        opened = (await stream.ask(1, open=opening("Counting"))).open
        await stream.ask(2, step=pb.StepRequest(session_id=opened.session_id, action="a"))
    assert (await client.step(opened.session_id, 1, "b")).observation == "2: b"
    async with raw_stream(client.target) as stream:
        step = pb.StepRequest(session_id=opened.session_id, turn=2, action="c")
        assert (await stream.ask(1, step=step)).step.observation == "3: c"


async def test_a_client_that_has_closed_its_side_gets_every_reply(stream: RawStream, opening: Opening) -> None:
    await stream.send(*(session_call(number, open=opening("Troublesome")) for number in range(8)))
    await stream.call.done_writing()
    assert len(await stream.replies(8)) == 8
    assert await stream.read() is grpc.aio.EOF
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_huge_replies_come_in_several_messages(serve: Any, opening: Opening) -> None:
    async with serve() as client, raw_stream(client.target) as stream:
        opens = [opening("Counting", limit=9, seed=number) for number in range(12)]
        await stream.send(*(session_call(number, open=request) for number, request in enumerate(opens)))
        sessions = [reply.open.session_id for reply in (await stream.replies(12)).values()]
        text = "x" * 900_000
        for session_id in sessions:  # each request alone is almost a message
            await stream.send(session_call(1, step=pb.StepRequest(session_id=session_id, action=text)))
            assert (await stream.replies(1))[1].step.observation == f"1: {text}"
        # All replies are ready at once: repeats.
        repeat = [pb.StepRequest(session_id=session_id, action="") for session_id in sessions]
        await stream.send(*(session_call(number, step=step) for number, step in enumerate(repeat)))
        sizes, seen = [], 0
        while seen < 12:
            message = await stream.read()
            sizes.append(message.ByteSize())
            seen += len(message.replies)
        assert max(sizes) <= ENVIRONMENT_MESSAGE_BYTES and len(sizes) == 3


async def test_the_server_reads_on_only_when_calls_are_answered(serve: Any, opening: Opening, troublesome: Any) -> None:
    patient = {"Troublesome": {"type": "troublesome:Troublesome", "isolation": "thread", "step_timeout_s": LIMIT_S}}
    async with serve(definitions=patient) as client, raw_stream(client.target) as stream:
        opened = (await stream.ask(0, open=opening("Troublesome"))).open
        hang = pb.StepRequest(session_id=opened.session_id, action="hang")
        late = opening()
        await stream.send(*(session_call(1 + number, step=hang) for number in range(MAX_UNANSWERED_CALLS)))
        await stream.send(session_call(9_999, open=late))
        # The other door of the same server says that the late call has not been looked at.
        reading = asyncio.create_task(stream.replies(MAX_UNANSWERED_CALLS + 1))
        for _ in range(20):
            assert (await client.list_environments()).open_sessions == 1
        troublesome.release.set()
        replies = await reading
        assert replies[9_999].HasField("open")
        assert all(replies[number].HasField("step") for number in range(1, MAX_UNANSWERED_CALLS + 1))


async def test_a_flood_in_one_message_from_a_client_that_does_not_read(
    client: EnvironmentClient, opening: Opening
) -> None:
    opened = await client.open_session(opening())
    count = 20_000
    renew = pb.RenewSessionRequest(session_id=opened.session_id)
    async with raw_stream(client.target) as stream:
        message = pb.PlayRequest(calls=[session_call(number, renew=renew) for number in range(count)])
        assert message.ByteSize() < ENVIRONMENT_MESSAGE_BYTES
        await stream.call.write(message)
        # Others are served meanwhile.
        assert not (await client.step(opened.session_id, 0, LEFT)).HasField("failure")
        replies = await stream.replies(count)
        assert all(reply.HasField("renew") for reply in replies.values())


async def test_a_server_that_drains_answers_inside_and_then_ends_the_stream(opening: Opening, troublesome: Any) -> None:
    definitions = {"Troublesome": {"type": "troublesome:Troublesome", "isolation": "thread", "step_timeout_s": LIMIT_S}}
    server = EnvironmentServer(RunConfig.model_validate({"environment": {"definitions": definitions}}))
    up, stop = asyncio.Event(), asyncio.Event()
    address = ""

    async def serve() -> None:
        nonlocal address
        async with serving(server, Binding(), grace_s=LIMIT_S) as running:
            address = running.address
            up.set()
            await stop.wait()

    task = asyncio.create_task(serve())
    await up.wait()
    async with raw_stream(address) as stream, raw_stream(address) as idle:
        opened = (await stream.ask(1, open=opening("Troublesome"))).open
        await idle.ask(1, renew=pb.RenewSessionRequest(session_id=opened.session_id))
        await stream.send(session_call(1, step=pb.StepRequest(session_id=opened.session_id, action="hang")))
        step = pb.StepRequest(session_id=opened.session_id, turn=7)
        while (reply := await stream.ask(2, step=step)).error.reason == Reason.WRONG_TURN:
            stop.set()
        assert (reply.error.code, reply.error.reason) == (grpc.StatusCode.UNAVAILABLE.value[0], Reason.DRAINING)
        assert await idle.read() is grpc.aio.EOF
        troublesome.release.set()
        assert (await stream.replies(1))[1].step.observation == "1: hang"
        assert await stream.read() is grpc.aio.EOF
    async with asyncio.timeout(LIMIT_S):
        await task
