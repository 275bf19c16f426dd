"""The HTTP edge: who may call, how much at once, and when a call is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollwire.rollout.agents.answering import Answering
from rollwire.rollout.agents.desk import MODEL
from rollwire.rollout.agents.errors import CallError, draining, session_closed, too_many, unknown_key
from rollwire.rollout.agents.registry import PolicySessions
from rollwire.rollout.agents.reply import Reply
from rollwire.rollout.agents.session import PolicySession
from rollwire.rpc.ids import new_id
from rollwire.serving.logs import get_logger

BODY_TIMEOUT_S: Final = 30.0
"""Longest time for the body of a request to arrive."""

_log = get_logger(__name__)
Answer: TypeAlias = Callable[[PolicySession, bytes, Reply], Coroutine[Any, Any, None]]


class Edge:
    """The application.

    Args:
        answering: Answers calls.
        sessions: All sessions.
        max_calls: Calls answered at once.
        max_body_bytes: Largest request.

    Attributes:
        draining: Set once no further call is taken.
    """

    def __init__(self, answering: Answering, sessions: PolicySessions, max_calls: int, max_body_bytes: int) -> None:
        self.draining = False
        self._sessions = sessions
        self._max_calls = max_calls
        self._max_body_bytes = max_body_bytes
        self._running = 0
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", _Calls(self, answering.chat), methods=["POST"]),
                Route("/v1/completions", _Calls(self, answering.completion), methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{model}", self._model, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _http_error, CallError: _call_error},  # type: ignore[dict-item]
        )

    async def serve(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one call to its end; every error is answered."""
        request, reply = Request(scope, receive), Reply(send)
        try:
            session = self._admitted(request)
            self._running += 1
            try:
                body = await self._body(request)
                await _unless_given_up(answer(session, body, reply), session, receive)
            finally:
                self._running -= 1
        except CallError as error:
            await reply.error(error)
        except ClientDisconnect:
            return
        except Exception as error:  # a bug here must not end the connection without a word
            incident = new_id("incident")
            _log.error("unexpected error in an agent's call", incident=incident, exc_info=error)
            message = (
                f"unexpected {type(error).__name__}; the log of the rollout server has the details under {incident}"
            )
            await reply.error(CallError(500, "internal", message))

    def _admitted(self, request: Request) -> PolicySession:
        session = self._session(request)
        if self.draining:
            raise draining()
        if self._running >= self._max_calls:
            raise too_many(self._max_calls, "on this server")
        return session

    def _session(self, request: Request) -> PolicySession:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        session = self._sessions.find(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            raise unknown_key()
        return session

    async def _body(self, request: Request) -> bytes:
        """Reads a body of bounded size in bounded time."""
        message = f"the request is larger than {self._max_body_bytes} bytes (rollout.http.max_request_mib); send less"
        refusal = CallError(413, "request_too_large", message)
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            raise refusal
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self._max_body_bytes:
                        raise refusal
        except TimeoutError as error:
            message = f"the request did not arrive within {BODY_TIMEOUT_S:g} s; send it again"
            raise CallError(408, "request_timeout", message, retry_after_s=1.0) from error
        return bytes(body)

    async def _models(self, request: Request) -> Response:
        self._session(request)
        return JSONResponse({"object": "list", "data": [_MODEL]})

    async def _model(self, request: Request) -> Response:
        self._session(request)
        if request.path_params["model"] != MODEL:
            raise CallError(404, "model_not_found", f"there is no such model; this server has {MODEL!r}", param="model")
        return JSONResponse(_MODEL)


class _Calls:
    """An ASGI endpoint: starlette hands it the raw channel, on which it sees that the agent has gone.

    Args:
        edge: The edge.
        answer: Answers the calls of this path.
    """

    def __init__(self, edge: Edge, answer: Answer) -> None:
        self._edge = edge
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._edge.serve(self._answer, scope, receive, send)


_MODEL: Final = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rollwire"}


async def _unless_given_up(work: Coroutine[Any, Any, None], session: PolicySession, receive: Receive) -> None:
    """Runs a call until it ends, its agent disconnects, or its session ends; what still runs is cancelled."""
    call = asyncio.create_task(work)
    gone, ended = asyncio.create_task(_disconnected(receive)), asyncio.create_task(session.ended.wait())
    tasks: tuple[asyncio.Task[Any], ...] = (call, gone, ended)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if call.done():
            await call
        elif not gone.done():
            raise session_closed()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _call_error(request: Request, error: CallError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers())


def _http_error(request: Request, error: HTTPException) -> Response:
    """Answers wrong paths and methods in OpenAI's form."""
    found = CallError(
        error.status_code,
        "not_found" if error.status_code == 404 else "method_not_allowed",
        f"{request.method} {request.url.path[:100]}: {error.detail}; there are POST /v1/chat/completions, POST "
        "/v1/completions and GET /v1/models",
    )
    return JSONResponse(found.body(), found.status, {**(error.headers or {}), **found.headers()})
