"""Starts zygotes and waits until they are ready. Blocking: for the time before the server serves."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from typing import Final

from rollwire.environment.isolation.frames import FrameError, FrameReader, Kind, frame
from rollwire.environment.isolation.process_tree import kill_group
from rollwire.environment.isolation.setup import ProcessSetup, program
from rollwire.environment.samples import UnusableError
from rollwire.v1 import environment_pb2 as pb

READY_TIMEOUT_S: Final = 120.0
"""Longest time to import and construct an environment."""

_SEND_TIMEOUT_S: Final = 30.0
_KILL_TIMEOUT_S: Final = 1.0
_READ_BYTES: Final = 1 << 16
_KEPT_OUTPUT_BYTES: Final = 2048
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class ZygoteProcess:
    """A zygote of the server's.

    Attributes:
        control: Connection to it.
    """

    def __init__(self, setup: ProcessSetup) -> None:
        """Starts the process; `await_ready` waits for it. Until it is ready, it ends with the thread that calls this.

        Raises:
            UnusableError: The system starts no process.
        """
        self._setup = setup
        try:
            self.control, theirs = socket.socketpair()
        except OSError as error:
            raise _no_process(setup, error) from error
        shown = [os.dup(2)] if setup.show_output else []
        threads = {name: os.environ.get(name, "1") for name in _ONE_THREAD}
        try:
            self._process = subprocess.Popen(  # noqa: S603 - arguments of our own
                [*program("zygote", setup), str(theirs.fileno()), str(os.getpid()), *map(str, shown)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **threads, "PYTHONUNBUFFERED": "1"},
                pass_fds=(theirs.fileno(), *shown),
                start_new_session=True,
            )
        except OSError as error:
            self.control.close()
            raise _no_process(setup, error) from error
        finally:
            theirs.close()
            for descriptor in shown:
                os.close(descriptor)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def await_ready(self) -> pb.EnvironmentDescription:
        """Waits until the environment was constructed once, and returns its description.

        Raises:
            UnusableError: That failed, or took too long; the process is gone.
        """
        assert self._process.stdout is not None
        output = bytearray()
        try:
            with self._process.stdout as printed:
                return self._await_ready(printed.fileno(), output)
        except BaseException:
            self.kill()
            raise

    def signal_end(self) -> None:
        """Kills the process without waiting; safe while another thread is in `await_ready`, which then raises."""
        if self._process.poll() is None:
            kill_group(self.pid)

    def kill(self) -> None:
        """Ends the process at once; its workers end with it."""
        self.signal_end()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may need longer, the event loop may not
            self._process.wait(_KILL_TIMEOUT_S)
        self.control.close()

    def end(self, timeout_s: float) -> None:
        """Lets the process end its workers and itself, and kills it when that takes longer than a limit."""
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill()

    def _await_ready(self, printed: int, output: bytearray) -> pb.EnvironmentDescription:
        self.control.settimeout(_SEND_TIMEOUT_S)
        with contextlib.suppress(OSError):  # it ended; what it printed says why
            self.control.sendall(frame(Kind.SETUP, self._setup.to_json()))
        self.control.setblocking(False)
        reader = FrameReader()
        deadline = time.monotonic() + READY_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(printed, selectors.EVENT_READ)
            while (left_s := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    data = _read(key.fd)
                    if key.fd == printed:
                        output += data
                        del output[:-_KEPT_OUTPUT_BYTES]
                        if not data:
                            selector.unregister(printed)
                    elif not data:
                        raise UnusableError(self._why_it_ended(printed, output))
                    else:
                        for kind, payload in _frames(reader, data):
                            if kind is Kind.READY:
                                return pb.EnvironmentDescription.FromString(payload)
                            raise UnusableError(payload.decode(errors="replace"))
        raise UnusableError(f"{self._setup.type} could not be constructed within {READY_TIMEOUT_S:g} s")

    def _why_it_ended(self, printed: int, output: bytearray) -> str:
        status = self._process.wait(_SEND_TIMEOUT_S)
        os.set_blocking(printed, False)
        with contextlib.suppress(BlockingIOError):
            output += os.read(printed, _READ_BYTES)
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        lines = output.decode(errors="replace").strip().splitlines()
        said = f"; it printed last: {lines[-1]!r:.300}" if lines else ""
        return f"{self._setup.type} ended its process when it was constructed: {how}{said}"


def _no_process(setup: ProcessSetup, error: OSError) -> UnusableError:
    return UnusableError(f"{setup.type} cannot have a process of its own: {error.strerror}")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _READ_BYTES)
    except ConnectionError:
        return b""


def _frames(reader: FrameReader, data: bytes) -> list[tuple[Kind, bytes]]:
    try:
        return list(reader.feed(data))
    except FrameError as error:
        raise UnusableError(f"the environment wrote into the connection of its process: {error}") from error
