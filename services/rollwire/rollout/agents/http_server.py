"""Runs the HTTP edge inside the event loop of the rollout server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.server import Server

from rollwire.rollout.agents.edge import Edge
from rollwire.serving.config.sections import HttpSection
from rollwire.serving.logs import get_logger
from rollwire.serving.server import ServeError

_log = get_logger(__name__)
_BACKLOG: Final = 1024
_IDLE_CONNECTION_S: Final = 30
_GRACE_S: Final = 2
# Connections beyond the calls: agents keep some open between calls.
_CONNECTIONS_PER_CALL: Final = 8


class _Server(Server):
    """A server that leaves signals to the process that it runs in."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures nothing."""
        yield


class HttpServer:
    """The edge behind a listening socket.

    Args:
        section: Where to listen; `address` is set.

    Attributes:
        base_url: Base URL for OpenAI's clients.

    Raises:
        ServeError: The port cannot be bound.
    """

    def __init__(self, section: HttpSection) -> None:
        assert section.address is not None
        self._section = section
        self._socket = _listen(section.address)
        host = section.address.rpartition(":")[0]
        self.base_url = (section.public_url or f"http://{host}:{self._socket.getsockname()[1]}/v1").rstrip("/")
        self._edge: Edge | None = None
        self._server: _Server | None = None
        self._task: asyncio.Task[Any] | None = None

    async def start(self, edge: Edge) -> None:
        """Serves from now on."""
        config = Config(
            edge.app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            limit_concurrency=self._section.max_concurrent_calls * _CONNECTIONS_PER_CALL,
            timeout_keep_alive=_IDLE_CONNECTION_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._edge = edge
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        _log.info("agents are served", base_url=self.base_url)

    def drain(self) -> None:
        """Refuses new calls; those that run go on."""
        if self._edge is not None:
            self._edge.draining = True

    async def close(self) -> None:
        """Ends connections and frees the port."""
        self.drain()
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host.strip("[]"), int(port)))
    except OSError as error:
        listening.close()
        raise ServeError(
            f"rollout.http.address is {address!r}: cannot listen there ({error.strerror or error}); several rollout "
            "servers on one host need a free port each: choose another one, or port 0 for a free one"
        ) from error
    listening.setblocking(False)
    return listening
