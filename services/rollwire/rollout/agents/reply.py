"""Sends the answer of one HTTP call: a JSON body, or server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollwire.rollout.agents.errors import CallError

if TYPE_CHECKING:
    from starlette.types import Send


class Reply:
    """The reply to one request.

    Args:
        send: Sends ASGI messages.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._streams = False

    async def whole(self, body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Sends one JSON body."""
        content = json.dumps(body, ensure_ascii=False).encode()
        fields = {"content-type": "application/json", "content-length": str(len(content)), **(headers or {})}
        await self._start(status, fields)
        await self._send({"type": "http.response.body", "body": content})

    async def event(self, body: Mapping[str, Any]) -> None:
        """Sends one event; the first one starts the stream."""
        if not self._streams:
            self._streams = True
            await self._start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        await self._data(json.dumps(body, ensure_ascii=False))

    async def end(self) -> None:
        """Ends a stream."""
        await self._data("[DONE]")
        await self._send({"type": "http.response.body", "body": b""})

    async def error(self, error: CallError) -> None:
        """Sends an error: as the reply, or as the last event of a stream that has begun."""
        if self._streams:
            await self._data(json.dumps(error.body(), ensure_ascii=False))
            await self._send({"type": "http.response.body", "body": b""})
        else:
            await self.whole(error.body(), error.status, error.headers())

    async def _data(self, text: str) -> None:
        body = f"data: {text}\n\n".encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _start(self, status: int, fields: Mapping[str, str]) -> None:
        headers = [(name.encode(), value.encode()) for name, value in fields.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
