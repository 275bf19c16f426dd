"""The server's side of a zygote: starts workers, kills them, hears of their ends. Everything runs on the event loop."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rollwire.environment.isolation.connection import WorkerConnection
from rollwire.environment.isolation.frames import FrameError, FrameReader, Kind, frame
from rollwire.environment.isolation.launch import ZygoteProcess
from rollwire.environment.isolation.process_tree import kill_group
from rollwire.environment.isolation.setup import ProcessSetup
from rollwire.environment.samples import UnusableError
from rollwire.serving.logs import get_logger

_log = get_logger(__name__)
_END_TIMEOUT_S: Final = 5.0
_READ_BYTES: Final = 1 << 16
_LOGGED_LINES: Final = 20


@dataclass(frozen=True)
class Ended:
    """How a worker ended.

    Attributes:
        how: As the rest of a sentence, such as `was killed by SIGSEGV`.
        output: The last lines that it and its descendants printed.
    """

    how: str
    output: list[str]


@dataclass
class _Process:
    on_ended: Callable[[Ended], None]
    pid: int = 0


class WorkerProcesses:
    """The worker processes of one tag."""

    def __init__(self, setup: ProcessSetup, zygote: ZygoteProcess) -> None:
        """Takes a zygote over.

        Args:
            setup: What it was started with; it is started again when it is gone.
            zygote: Ready.
        """
        self._setup = setup
        self._zygote: ZygoteProcess | None = zygote
        self._starting: ZygoteProcess | None = None
        self._attached = False
        self._closed = False
        self._lock = asyncio.Lock()
        self._frames = FrameReader()
        self._workers: dict[int, _Process] = {}
        self._count = 0

    async def start(self, connection: WorkerConnection, on_ended: Callable[[Ended], None]) -> int:
        """Starts a worker and connects it.

        Args:
            connection: Connected on return.
            on_ended: Called when the process and all that it left behind are gone; also when it never began.

        Returns:
            Its number, for `kill`.

        Raises:
            UnusableError: The zygote was gone and cannot be started again, or the system gives no connection.
        """
        async with self._lock:
            await self._ensure_zygote()
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise UnusableError(str(error.strerror)) from error
        self._count += 1
        number = self._count
        self._workers[number] = _Process(on_ended)
        with theirs:
            self._order(Kind.FORK, number, theirs)
        await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=ours)
        return number

    def kill(self, number: int) -> None:
        """Kills a worker with its group; one that is gone is no error."""
        if number in self._workers:
            self._order(Kind.KILL, number)

    async def end(self) -> None:
        """Ends all workers and the zygote."""
        self._closed = True
        if self._starting is not None:
            self._starting.signal_end()
        zygote = self._zygote
        if zygote is not None:
            self._zygote_gone()
            await asyncio.to_thread(zygote.end, _END_TIMEOUT_S)

    async def _ensure_zygote(self) -> None:
        if self._closed:
            raise UnusableError("the server is stopping")
        if self._zygote is None:
            _log.warning("starting the environment's processes again", environment_tag=self._setup.tag)
            # Started from the thread of the event loop: until it is ready, it ends with the thread that started it.
            self._starting = ZygoteProcess(self._setup)
            try:
                await asyncio.to_thread(self._starting.await_ready)
                self._zygote = self._starting
            finally:
                self._starting = None
        if not self._attached:
            self._attached = True
            self._frames = FrameReader()
            self._zygote.control.setblocking(False)
            asyncio.get_running_loop().add_reader(self._zygote.control, self._on_readable)

    def _order(self, kind: Kind, number: int, descriptor: socket.socket | None = None) -> None:
        zygote = self._zygote
        if zygote is None:
            return
        data = frame(kind, json.dumps({"worker": number}).encode())
        descriptors = [] if descriptor is None else [descriptor.fileno()]
        try:
            whole = socket.send_fds(zygote.control, [data], descriptors) == len(data)
        except OSError:
            whole = False
        if not whole:  # it is gone, or has read nothing for thousands of orders
            self._zygote_gone()
            zygote.kill()

    def _on_readable(self) -> None:
        zygote = self._zygote
        if zygote is None:
            return
        try:
            data = zygote.control.recv(_READ_BYTES)
            for kind, payload in self._frames.feed(data):
                self._take(kind, json.loads(payload))
        except BlockingIOError:
            return
        except (OSError, FrameError, ValueError, KeyError):
            data = b""
        if not data and self._zygote is zygote:
            _log.error("the parent of the environment's processes is gone", environment_tag=self._setup.tag)
            self._zygote_gone()
            zygote.kill()

    def _take(self, kind: Kind, fields: dict[str, object]) -> None:
        number = fields["worker"]
        assert isinstance(number, int)
        if kind is Kind.FORKED:
            self._workers[number].pid = int(str(fields["pid"]))
        elif kind is Kind.ENDED:
            output = str(fields["output"]).splitlines()[-_LOGGED_LINES:]
            self._workers.pop(number).on_ended(Ended(str(fields["how"]), output))

    def _zygote_gone(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None and self._attached:
            asyncio.get_running_loop().remove_reader(zygote.control)
        self._attached = False
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            if worker.pid and not self._closed:
                kill_group(worker.pid)  # the kernel has killed the worker, but not what it started
            worker.on_ended(Ended("ended with its parent", []))
