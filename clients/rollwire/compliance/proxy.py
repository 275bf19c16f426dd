"""A TCP proxy whose connections a test can cut, and whose door it can shut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class TcpProxy:
    """Passes bytes between its port and a target.

    Attributes:
        address: Where it listens.
        target: `host:port` that new connections are passed on to.
        open: Whether new connections are passed on; else they are dropped at once.
    """

    def __init__(self, target: str) -> None:
        self.address = ""
        self.open = True
        self.target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """Drops all connections, as a network does."""
        for writer in self._writers:
            writer.transport.abort()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes a connection."""
        if not self.open:
            writer.transport.abort()
            return
        host, _, port = self.target.rpartition(":")
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.transport.abort()
        self._writers.discard(sink)


@asynccontextmanager
async def tcp_proxy(target: str) -> AsyncIterator[TcpProxy]:
    """Proxies `host:port` while the context is open."""
    proxy = TcpProxy(target)
    server = await asyncio.start_server(proxy.connected, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
