"""Sessions of a provider whose threads all hang: turns fail at once, and nothing is kept of them."""

from __future__ import annotations

import threading
from typing import Any

from rollwire.client.provided import provided_environment
from rollwire.client.provider_sessions import ProviderSessions
from rollwire.v1 import environment_pb2 as pb

TIMEOUT = pb.ENVIRONMENT_FAILURE_KIND_TIMEOUT
release = threading.Event()


class Hanging:
    max_turns = 5

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        release.wait(60)
        return "", 0.0, False, False, {}


async def open_one(sessions: ProviderSessions, request_id: str) -> str:
    call = pb.SessionCall(call_id=1, open=pb.OpenSessionRequest(request_id=request_id, environment_tag="Hanging"))
    call.timeout.FromSeconds(60)
    return (await sessions.answer(call)).open.session_id


async def step(sessions: ProviderSessions, session_id: str) -> pb.StepResponse:
    call = pb.SessionCall(call_id=2, step=pb.StepRequest(session_id=session_id))
    call.timeout.FromSeconds(1)
    return (await sessions.answer(call)).step


async def test_turns_fail_at_once_when_every_thread_hangs() -> None:
    release.clear()
    sessions = ProviderSessions({"Hanging": provided_environment("Hanging", Hanging, None)}, capacity=2)
    first, second = [await open_one(sessions, request_id) for request_id in ("one", "two")]
    try:
        assert (await step(sessions, first)).failure.kind == TIMEOUT
        await sessions.answer(pb.SessionCall(call_id=3, close=pb.CloseSessionRequest(session_id=first)))
        third = await open_one(sessions, "three")
        assert (await step(sessions, second)).failure.kind == TIMEOUT
        assert sessions.hung_threads == 2
        reply = await step(sessions, third)
        assert (reply.failure.kind, reply.failure.message) == (TIMEOUT, "all threads of this provider hang; restart it")
        assert await step(sessions, third) == reply
        assert not sessions._under_way
    finally:
        release.set()
