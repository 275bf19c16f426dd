"""A zygote: imports the environment of one tag once, then forks workers from it. A program of its own.

Arguments: descriptor of the connection to the server, process id of the server, and, if what workers print is to be
shown, a descriptor to write it to. After an environment was constructed
to try it, nothing of the environment runs here any more: a zygote only forks, kills and reaps, and keeps the last lines
that its workers print. It ends with the server, and all its descendants end with it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Final, NoReturn

from rollwire.environment.isolation.frames import FrameReader, Kind, frame
from rollwire.environment.isolation.limits import confine, reseed
from rollwire.environment.isolation.process_tree import (
    become_subreaper,
    children,
    die_with_parent,
    has_ended,
    kill_group,
    kill_strays,
    outlive_parent,
    thread_count,
)
from rollwire.environment.isolation.setup import Prepared, ProcessSetup, prepare, program, try_out
from rollwire.environment.isolation.worker import serve_and_exit
from rollwire.environment.samples import UnusableError
from rollwire.environment.types import one_line

_READ_BYTES: Final = 1 << 16
_MAX_DESCRIPTORS: Final = 64
_KEPT_OUTPUT_BYTES: Final = 4096
_END_TIMEOUT_S: Final = 4.0
_SWEEP_S: Final = 0.002
_LAST_OUTPUT_BYTES: Final = 1 << 20
"""What is read of a worker's output after its end, at most: somebody else may still hold the pipe."""


@dataclass
class _Child:
    """A worker; `kept` is the end of what it printed."""

    worker: int
    pid: int
    output: int
    kept: bytes = b""


class Zygote:
    """Forks, kills and reaps the workers of one tag."""

    def __init__(self, control: socket.socket, setup: ProcessSetup, prepared: Prepared, shown: int | None) -> None:
        self._control = control
        self._shown = shown
        self._setup = setup
        self._prepared = prepared
        self._frames = FrameReader()
        self._descriptors: list[int] = []
        self._children: dict[int, _Child] = {}
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serves until the server closes the connection."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    if not self._read_control():
                        return
                elif key.fd == self._wake_read:
                    os.read(self._wake_read, _READ_BYTES)
                    self._reap()
                else:
                    self._read_output(key.data)

    def end(self) -> NoReturn:
        """Kills everything that was started here, and this process."""
        signal.set_wakeup_fd(-1)
        for child in self._children.values():
            kill_group(child.pid)
        deadline = time.monotonic() + _END_TIMEOUT_S
        with contextlib.suppress(Exception):
            # The children of what is killed become this process's only when it is dead.
            while children() and time.monotonic() < deadline:
                kill_strays(())
                time.sleep(_SWEEP_S)
        for child in self._children.values():
            self._read_rest(child)
        os.killpg(0, signal.SIGKILL)
        os._exit(1)

    def _read_control(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, _READ_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        self._descriptors += descriptors
        for kind, payload in self._frames.feed(data):
            order = json.loads(payload)
            if kind is Kind.FORK:
                # Descriptors arrive with the first byte of their frame, if not before.
                self._fork(order["worker"], socket.socket(fileno=self._descriptors.pop(0)))
            elif kind is Kind.KILL and order["worker"] in self._children:
                kill_group(self._children[order["worker"]].pid)
        return bool(data)

    def _fork(self, worker: int, connection: socket.socket) -> None:
        try:
            read_end, write_end = os.pipe()
        except OSError as error:
            connection.close()
            self._tell_not_started(worker, error)
            return
        zygote_pid, threads = os.getpid(), thread_count()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(read_end)
            self._tell_not_started(worker, error)
        else:
            if pid == 0:
                self._become_worker(connection, (read_end, write_end), zygote_pid, afresh=threads > 1)
            os.set_blocking(read_end, False)
            child = self._children[worker] = _Child(worker, pid, read_end)
            self._selector.register(read_end, selectors.EVENT_READ, child)
            self._tell(Kind.FORKED, worker=worker, pid=pid)
        finally:
            os.close(write_end)
            connection.close()

    def _become_worker(
        self, connection: socket.socket, output: tuple[int, int], zygote_pid: int, *, afresh: bool
    ) -> NoReturn:
        """In the fork: leaves everything behind that belongs to the zygote, and serves."""
        read_end, write_end = output
        try:
            os.setsid()
            die_with_parent(zygote_pid)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            self._control.close()
            for descriptor in (self._wake_read, self._wake_write, read_end):
                os.close(descriptor)
            for child in self._children.values():
                os.close(child.output)
            if self._shown is not None:
                os.close(self._shown)
            os.dup2(write_end, 1)
            os.dup2(write_end, 2)
            os.close(write_end)
            if afresh:
                self._exec(connection, zygote_pid)
            confine(self._setup.memory_mib)
            reseed()
            serve_and_exit(connection, self._prepared)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _exec(self, connection: socket.socket, zygote_pid: int) -> None:
        """Starts afresh: the environment's libraries run threads, which a fork does not have."""
        file = os.memfd_create("setup", 0)
        os.write(file, self._setup.to_json())
        os.lseek(file, 0, os.SEEK_SET)
        connection.set_inheritable(True)
        arguments = map(str, (connection.fileno(), file, zygote_pid))
        os.execv(sys.executable, [*program("worker", self._setup), *arguments])  # noqa: S606 - arguments of our own

    def _read_output(self, child: _Child) -> int:
        try:
            data = os.read(child.output, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(child.output)
        child.kept = (child.kept + data)[-_KEPT_OUTPUT_BYTES:]
        if self._shown is not None:
            with contextlib.suppress(OSError):  # nobody reads it any more
                os.write(self._shown, data)
        return len(data)

    def _read_rest(self, child: _Child) -> None:
        read = 0
        while read < _LAST_OUTPUT_BYTES and (count := self._read_output(child)):
            read += count

    def _reap(self) -> None:
        for child in [child for child in self._children.values() if has_ended(child.pid)]:
            kill_group(child.pid)
            _, status = os.waitpid(child.pid, 0)
            self._forget(child, _how(status))
        kill_strays((os.getpid(), *(child.pid for child in self._children.values())))

    def _forget(self, child: _Child, how: str) -> None:
        del self._children[child.worker]
        self._read_rest(child)
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.output)
        os.close(child.output)
        self._tell(Kind.ENDED, worker=child.worker, how=how, output=child.kept.decode(errors="replace"))

    def _tell_not_started(self, worker: int, error: OSError) -> None:
        self._tell(Kind.ENDED, worker=worker, how=f"could not be started: {error.strerror}", output="")

    def _tell(self, kind: Kind, **fields: object) -> None:
        self._control.sendall(frame(kind, json.dumps(fields).encode()))


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with status {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def main() -> None:
    """Makes the environment ready, tells the server, and serves."""
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    become_subreaper()
    shown = int(sys.argv[3]) if len(sys.argv) > 3 else None
    if shown is not None:
        os.set_inheritable(shown, False)
    setup = _receive_setup(control)
    try:
        prepared = prepare(setup)
        description = try_out(setup, prepared)
    except UnusableError as error:
        if shown is not None and error.__cause__ is not None:
            with open(shown, "w", encoding="utf-8", errors="replace", closefd=False) as screen:
                traceback.print_exception(error.__cause__, file=screen)
        control.sendall(frame(Kind.REFUSED, str(error).encode(errors="replace")))
        return
    except BaseException as error:
        text = f"{setup.type} cannot be loaded: {one_line(error)}"
        control.sendall(frame(Kind.REFUSED, text.encode(errors="replace")))
        return
    # From now on the end of the connection says that the server is gone, and there is time to end all descendants.
    outlive_parent()
    control.sendall(frame(Kind.READY, description.SerializeToString()))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    gc.collect()
    gc.freeze()  # a collection in a worker would otherwise copy the pages that it shares with the zygote
    zygote = Zygote(control, setup, prepared, shown)
    try:
        zygote.run()
    finally:
        zygote.end()


def _receive_setup(control: socket.socket) -> ProcessSetup:
    reader = FrameReader()
    while data := control.recv(_READ_BYTES):
        for _, payload in reader.feed(data):
            return ProcessSetup.from_json(payload)
    sys.exit(1)


if __name__ == "__main__":
    main()
