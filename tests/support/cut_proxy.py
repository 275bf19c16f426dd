"""A TCP proxy whose connections a test can cut."""

from __future__ import annotations

import asyncio
from types import TracebackType


class CutProxy:
    """Forwards to a target; `cut` breaks every connection, and new ones are accepted again.

    Attributes:
        address: Where it listens.
        connections: Number of connections accepted so far.
    """

    def __init__(self, target: str) -> None:
        self.address = ""
        self.connections = 0
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> CutProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Breaks what is connected now."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        back_reader, back_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, back_writer}
        await asyncio.gather(self._copy(reader, back_writer), self._copy(back_reader, writer))
        self._writers -= {writer, back_writer}

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()
