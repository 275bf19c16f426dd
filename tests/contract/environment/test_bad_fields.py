"""Every field of every request outside its range: refused with its path, alike over unary calls and inside a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from rollwire.client.environment import EnvironmentClient
from rollwire.client.environment_stream import SessionStream
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import environment_pb2 as pb

Opening = Callable[..., pb.OpenSessionRequest]
MIB = 1 << 20
NEVER = 2**32 - 1
INVALID = (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD)
UNKNOWN_SESSION = (grpc.StatusCode.NOT_FOUND, Reason.UNKNOWN_SESSION)
WRONG_TURN = (grpc.StatusCode.FAILED_PRECONDITION, Reason.WRONG_TURN)
ENDED = (grpc.StatusCode.FAILED_PRECONDITION, Reason.EPISODE_ENDED)


@dataclass(frozen=True)
class Sessions:
    """Sessions of one transport: one that waits for turn 1, one that has ended, one whose lease is over, one closed."""

    live: str
    ended: str
    expired: str
    closed: str
    blind: str


def to_open(**changes: Any) -> pb.OpenSessionRequest:
    options = changes.pop("options", None)
    request = pb.OpenSessionRequest(**{"request_id": "r", "environment_tag": "FrozenLake", "seed": 1, **changes})
    if options is not None:
        request.options.update(options)
    return request


def lease(seconds: int, nanos: int) -> Duration:
    return Duration(seconds=seconds, nanos=nanos)


LEASES = [(0, 0), (0, 999_999_999), (3600, 1), (3601, 0), (-5, 0), (1, -1), (2, 10**9), (2**62, 0)]
REQUEST_IDS = ["", "x" * 65, "a b", "a\n", "ä", "\x00", "tab\t", "x" * 3_000_000]
TAGS = ["", "a/b", "..", "a..b", "../../etc/passwd", "os:system", "x" * 64, "-a", "a b", "ä", "a\x1b[2J", "x" * MIB]
OPTIONS = [
    ({"sise": 4}, "options.sise"),
    ({"size": "4"}, "options.size"),
    ({"size": 4.5}, "options.size"),
    ({"size": float("nan")}, "options"),
    ({"p": float("inf")}, "options"),
    ({"p": None}, "options.p"),
    ({"size": [[[4]]]}, "options.size"),
    ({"size": 1}, "options"),
    ({"action_pattern": "(a+)+$"}, "options.action_pattern"),
    ({"env_instruction": "x" * 70_000}, "options"),
    ({"a\nb": 1}, "options.a\\nb"),
    ({"": 1}, "options."),
]
TEXT = pb.RENDER_FORMAT_TEXT
NO_SESSIONS = ["", "x", "0" * 32, "x" * 100_000, "a\x00b\n", "ä"]
LONG_ACTIONS = ["x" * (MIB + 1), "x" * (3 * MIB), "√" * (MIB // 3 + 1)]

Ask = Callable[[Sessions], Any]
CASES: list[tuple[str, Ask, tuple[grpc.StatusCode, Reason], str | None]] = [
    *(("open", lambda s, v=value: to_open(request_id=v), INVALID, "request_id") for value in REQUEST_IDS),
    *(("open", lambda s, v=value: to_open(environment_tag=v), INVALID, "environment_tag") for value in TAGS),
    *(("open", lambda s, v=value: to_open(lease=lease(*v)), INVALID, "lease") for value in LEASES),
    *(("open", lambda s, v=value: to_open(options=v), INVALID, field) for value, field in OPTIONS),
    (
        "open",
        lambda s: to_open(environment_tag="Frozenlake"),
        (grpc.StatusCode.NOT_FOUND, Reason.UNKNOWN_ENVIRONMENT),
        None,
    ),
    ("open", lambda s: to_open(request_id="taken"), INVALID, "request_id"),
    *(("step", lambda s, v=value: pb.StepRequest(session_id=v), UNKNOWN_SESSION, None) for value in NO_SESSIONS),
    *(
        ("step", lambda s, v=value: pb.StepRequest(session_id=s.live, turn=1, action=v), INVALID, "action")
        for value in LONG_ACTIONS
    ),
    *(("step", lambda s, v=value: pb.StepRequest(session_id=s.live, turn=v), WRONG_TURN, None) for value in (2, NEVER)),
    ("step", lambda s: pb.StepRequest(session_id=s.ended, turn=1), ENDED, None),
    ("step", lambda s: pb.StepRequest(session_id=s.ended, turn=2), WRONG_TURN, None),
    ("step", lambda s: pb.StepRequest(session_id=s.expired, turn=0), UNKNOWN_SESSION, None),
    ("step", lambda s: pb.StepRequest(session_id=s.closed, turn=0), UNKNOWN_SESSION, None),
    *(
        ("renew", lambda s, v=value: pb.RenewSessionRequest(session_id=v), UNKNOWN_SESSION, None)
        for value in NO_SESSIONS
    ),
    *(
        ("renew", lambda s, v=value: pb.RenewSessionRequest(session_id=s.live, lease=lease(*v)), INVALID, "lease")
        for value in LEASES
    ),
    ("renew", lambda s: pb.RenewSessionRequest(session_id=s.expired), UNKNOWN_SESSION, None),
    *(
        ("render", lambda s, v=value: pb.RenderRequest(session_id=s.live, format=v), INVALID, "format")
        for value in (0, 3, 1000, -1)
    ),
    *(
        (
            "render",
            lambda s, v=value: pb.RenderRequest(session_id=v, format=TEXT),
            UNKNOWN_SESSION,
            None,
        )
        for value in NO_SESSIONS
    ),
    (
        "render",
        lambda s: pb.RenderRequest(session_id=s.blind, format=pb.RENDER_FORMAT_TEXT),
        (grpc.StatusCode.FAILED_PRECONDITION, Reason.RENDER_UNSUPPORTED),
        None,
    ),
]


async def prepare(api: Any, clock: Any, make: Opening) -> Sessions:
    expired = await api.call("open", make("Counting", lease_s=1.0))
    clock.now += 2
    live = await api.call("open", make("FrozenLake"))
    await api.call("step", pb.StepRequest(session_id=live.session_id, action="<answer>Left</answer>"))
    ended = await api.call("open", make("Counting"))
    await api.call("step", pb.StepRequest(session_id=ended.session_id, action="stop"))
    closed = await api.call("open", make("FrozenLake"))
    await api.call("close", pb.CloseSessionRequest(session_id=closed.session_id))
    blind = await api.call("open", make("Blind"))
    return Sessions(*(item.session_id for item in (live, ended, expired, closed, blind)))


async def refusal(call: Any) -> RollwireError:
    with pytest.raises(RollwireError) as caught:
        await call
    return caught.value


def parts(error: RollwireError) -> tuple[Any, ...]:
    return error.code, error.reason, error.message, error.metadata, error.fields, error.retry_after_s


@pytest.mark.parametrize(("kind", "ask", "expected", "field"), CASES, ids=[f"{n}-{c[0]}" for n, c in enumerate(CASES)])
async def test_both_transports_refuse_alike(
    client: EnvironmentClient,
    clock: Any,
    opening: Opening,
    kind: str,
    ask: Ask,
    expected: tuple[grpc.StatusCode, Reason],
    field: str | None,
) -> None:
    async with SessionStream(client) as stream:
        await client.open_session(opening(request_id="taken", seed=99))
        errors = []
        for api in (client, stream):
            sessions = await prepare(api, clock, opening)
            errors.append(await refusal(api.call(kind, ask(sessions))))
            reply = await api.step(sessions.live, 1, "<answer>Left</answer>")
            assert not reply.HasField("failure"), "nothing but the call itself may suffer"
        unary, streamed = errors
    assert parts(unary) == parts(streamed)
    assert (unary.code, unary.reason) == expected
    assert list(unary.fields) == ([] if field is None else [field])
    assert len(unary.message) < 500 and unary.message.isprintable()
    assert len(repr(unary.metadata)) < 1000


@pytest.mark.parametrize("session_id", NO_SESSIONS)
async def test_closing_what_does_not_exist_is_no_error(client: EnvironmentClient, session_id: str) -> None:
    async with SessionStream(client) as stream:
        await client.close_session(session_id)
        await stream.close_session(session_id)


@pytest.mark.parametrize("megabytes", [5, 10])
async def test_text_above_the_size_of_a_message(client: EnvironmentClient, opening: Opening, megabytes: int) -> None:
    async with SessionStream(client) as stream:
        for api in (client, stream):
            opened = await api.open_session(opening())
            error = await refusal(api.step(opened.session_id, 0, "x" * (megabytes * 1_000_000)))
            assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.TRANSPORT)
            assert not (await api.step(opened.session_id, 0, "a")).HasField("failure")


async def test_an_option_with_an_endless_name(client: EnvironmentClient, opening: Opening) -> None:
    async with SessionStream(client) as stream:
        request = opening(**{"x" * 60_000: 1})
        unary, streamed = [await refusal(api.call("open", request)) for api in (client, stream)]
    assert parts(unary) == parts(streamed)
    assert (unary.code, unary.reason) == INVALID
    assert next(iter(unary.fields)).startswith("options.xxx") and len(unary.message) < 500


async def test_full_servers_say_when_to_ask_again(serve: Any, opening: Opening) -> None:
    async with serve(max_sessions=1) as client, SessionStream(client) as stream:
        await client.open_session(opening())
        unary, streamed = [await refusal(api.open_session(opening())) for api in (client, stream)]
    assert parts(unary) == parts(streamed)
    assert (unary.code, unary.retry_after_s) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 1.0)
