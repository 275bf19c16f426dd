"""Requests that no server should have to see: refused with the field, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from rollwire.client.environment import EnvironmentClient
from rollwire.rpc.channel import open_environment_channel
from rollwire.rpc.errors import Reason, RollwireError, from_rpc_error
from rollwire.v1 import environment_pb2 as pb

Opening = Callable[..., pb.OpenSessionRequest]
METHODS = ["ListEnvironments", "OpenSession", "Step", "RenewSession", "Render", "CloseSession"]
MIB = 1 << 20


async def raw_call(target: str, method: str, data: bytes, timeout: float | None) -> RollwireError:
    async with open_environment_channel(target) as channel:
        call = channel.unary_unary(f"/rollwire.v1.EnvironmentService/{method}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(data, timeout=timeout)
    return from_rpc_error(caught.value)


async def invalid(call: Any, field: str) -> RollwireError:
    with pytest.raises(RollwireError) as caught:
        await call
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD)
    assert list(caught.value.fields) == [field]
    assert "allowed: " in caught.value.message
    return caught.value


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_without_deadline(client: EnvironmentClient, method: str) -> None:
    error = await raw_call(client.target, method, b"", None)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.DEADLINE_REQUIRED)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05ab"], ids=["tag", "length"])
async def test_malformed_bytes(client: EnvironmentClient, method: str, data: bytes) -> None:
    error = await raw_call(client.target, method, data, 5)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.MALFORMED_MESSAGE)


@pytest.mark.parametrize("method", METHODS[1:])
async def test_text_that_is_not_utf8(client: EnvironmentClient, method: str) -> None:
    error = await raw_call(client.target, method, b"\x0a\x02\xff\xfe", 5)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.MALFORMED_MESSAGE)


@pytest.mark.parametrize("request_id", ["", "x" * 65, "a b", "a\n", "ä", "\x00", "tab\t"])
async def test_request_ids(client: EnvironmentClient, opening: Opening, request_id: str) -> None:
    request = opening()
    request.request_id = request_id
    await invalid(client.open_session(request), "request_id")


@pytest.mark.parametrize("tag", ["", "a/b", "..", "a..b", "../../etc/passwd", "os:system", "x" * 64, "-a", "a b", "ä"])
async def test_tags_that_cannot_exist(client: EnvironmentClient, opening: Opening, tag: str) -> None:
    await invalid(client.open_session(opening(tag)), "environment_tag")


@pytest.mark.parametrize("tag", ["Frozenlake", "os.system", "troublesome.Counting"])
async def test_tags_that_do_not_exist(client: EnvironmentClient, opening: Opening, tag: str) -> None:
    with pytest.raises(RollwireError) as caught:
        await client.open_session(opening(tag))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.NOT_FOUND, Reason.UNKNOWN_ENVIRONMENT)
    known = [item.tag for item in (await client.list_environments()).environments]
    assert f"registered: {', '.join(known)} (" in caught.value.message
    assert ("did you mean FrozenLake?" in caught.value.message) == (tag == "Frozenlake")


@pytest.mark.parametrize(
    ("seconds", "nanos"), [(0, 0), (0, 999_999_999), (3600, 1), (3601, 0), (-5, 0), (1, -1), (2, 10**9), (2**62, 0)]
)
async def test_leases(client: EnvironmentClient, opening: Opening, seconds: int, nanos: int) -> None:
    request = opening()
    request.lease.CopyFrom(Duration(seconds=seconds, nanos=nanos))
    await invalid(client.open_session(request), "lease")
    opened = await client.open_session(opening())
    renewal = pb.RenewSessionRequest(session_id=opened.session_id, lease=request.lease)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client._stub.RenewSession(renewal, timeout=5)
    assert list(from_rpc_error(caught.value).fields) == ["lease"]


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"sise": 4}, "options.sise", "did you mean size?"),
        ({"size": "4"}, "options.size", "a valid integer"),
        ({"size": 4.5}, "options.size", "a valid integer"),
        ({"is_slippery": 1}, "options.is_slippery", "a valid boolean"),
        ({"p": None}, "options.p", "a valid number"),
        ({"action_pattern": "(a+)+$"}, "options.action_pattern", "only in the server's configuration"),
        ({"special_token_list": ["x"]}, "options.special_token_list", "only in the server's configuration"),
        ({"env_instruction": "x" * 70_000}, "options", "at most 65536 bytes"),
    ],
)
async def test_options(
    client: EnvironmentClient, opening: Opening, options: dict[str, Any], field: str, says: str
) -> None:
    error = await invalid(client.open_session(opening(**options)), field)
    assert says in error.message


async def test_options_that_are_no_json(client: EnvironmentClient, opening: Opening) -> None:
    for number in (float("nan"), float("inf")):
        await invalid(client.open_session(opening(p=number)), "options")


async def test_options_nested_too_deeply(client: EnvironmentClient, opening: Opening) -> None:
    nested: Any = 1.0
    for _ in range(60):
        nested = [nested]
    data = opening(size=nested).SerializePartialToString()
    error = await raw_call(client.target, "OpenSession", data, 5)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_options_change_the_session_and_only_it(client: EnvironmentClient, opening: Opening) -> None:
    big = await client.open_session(opening(size=6, max_steps=3))
    assert (len(big.observation.splitlines()), big.max_turns) == (6, 3)
    assert len((await client.open_session(opening())).observation.splitlines()) == 4


@pytest.mark.parametrize(
    "action", ["x" * (2 * MIB), "x" * (MIB + 1), "√" * (MIB // 3 + 1)], ids=["2 MiB", "1 MiB + 1", "multibyte"]
)
async def test_actions_that_are_too_long(client: EnvironmentClient, opening: Opening, action: str) -> None:
    opened = await client.open_session(opening())
    error = await invalid(client.step(opened.session_id, 0, action), "action")
    assert "at most 1048576 bytes" in error.message
    assert len(error.message) < 300
    assert (await client.step(opened.session_id, 0, "<answer>Left</answer>")).metrics["action_is_valid"] == 1.0


@pytest.mark.parametrize("tag", ["FrozenLake", "FrozenLakeThink"])
@pytest.mark.parametrize(
    "action",
    [
        "",
        "\x00",
        "\u202e\x1b[2J\x07",
        "x" * MIB,
        "<answer>" * (MIB // 8),
        ("<think>" * 90_000 + "</think><answer>" * 26_000),
    ],
    ids=["empty", "nul", "control", "1 MiB", "answer tags", "think tags"],
)
async def test_any_other_text_is_a_turn(client: EnvironmentClient, opening: Opening, tag: str, action: str) -> None:
    opened = await client.open_session(opening(tag))
    reply = await client.step(opened.session_id, 0, action, timeout_s=10)
    assert (reply.reward, reply.metrics["action_is_valid"]) == (-0.01, 0.0)
    assert reply.observation == opened.observation


async def test_a_message_above_the_limit_of_the_port(client: EnvironmentClient) -> None:
    request = pb.StepRequest(action="x" * (5 * MIB)).SerializeToString()
    async with grpc.aio.insecure_channel(client.target, options=[("grpc.max_send_message_length", 8 * MIB)]) as channel:
        call = channel.unary_unary("/rollwire.v1.EnvironmentService/Step")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(request, timeout=10)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("session_id", ["", "x", "0" * 32, "x" * 100_000])
async def test_sessions_that_do_not_exist(client: EnvironmentClient, session_id: str) -> None:
    for call in (
        client.step(session_id, 0, "a"),
        client.renew_session(session_id),
        client.render(session_id, pb.RENDER_FORMAT_TEXT),
    ):
        with pytest.raises(RollwireError) as caught:
            await call
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.NOT_FOUND, Reason.UNKNOWN_SESSION)
        assert len(caught.value.message) < 200
    await client.close_session(session_id)


@pytest.mark.parametrize("render_format", [0, 3, 1000])
async def test_render_formats(client: EnvironmentClient, opening: Opening, render_format: int) -> None:
    opened = await client.open_session(opening())
    await invalid(client.render(opened.session_id, render_format), "format")  # type: ignore[arg-type]
