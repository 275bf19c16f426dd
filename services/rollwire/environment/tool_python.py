"""A Python tool: code of the policy in a process with limits.

The limits are for accidents: endless loops, memory, floods of output, left-over processes. They are no jail: the code
runs as the server's user and reaches what that user reaches, the network too.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollwire.rpc.limits import MIB

MAX_CODE_BYTES: Final = 64 * 1024
_LAUNCHER: Final = Path(__file__).with_name("tool_launcher.py")
_MAX_FILE_BYTES: Final = 16 * MIB
_POLL_S: Final = 0.02
_READ_BYTES: Final = 64 * 1024


@dataclass(frozen=True)
class ToolResult:
    """What became of code.

    Attributes:
        output: What it printed, both streams in order, with a note when it was stopped.
        ok: Whether it ended by itself, without an error.
    """

    output: str
    ok: bool


class PythonTool:
    """Runs code, each time in a fresh process and an empty directory."""

    def __init__(self, timeout_s: float, memory_mib: int, max_output_characters: int) -> None:
        """Sets the limits.

        Args:
            timeout_s: Longest time, 0.1 to 600.
            memory_mib: Most address space, 64 to 65536.
            max_output_characters: Longest output, 1 to 100,000; code that prints more is stopped.

        Raises:
            ValueError: A limit is out of range.
        """
        for name, value, least, most in (
            ("tool_timeout_s", timeout_s, 0.1, 600),
            ("tool_memory_mib", memory_mib, 64, 65_536),
            ("max_output_characters", max_output_characters, 1, 100_000),
        ):
            if not least <= value <= most:
                raise ValueError(f"{name} is {value}; allowed: {least} to {most}")
        self._timeout_s = timeout_s
        self._memory_mib = memory_mib
        self._max_output = max_output_characters

    def run(self, code: str) -> ToolResult:
        """Runs code; whatever it does is in the result."""
        encoded = code.encode("utf-8", "replace")
        if len(encoded) > MAX_CODE_BYTES:
            return ToolResult(f"[the code has {len(encoded)} bytes; allowed: at most {MAX_CODE_BYTES}]", ok=False)
        limits = (math.ceil(self._timeout_s) + 1, self._memory_mib * MIB, _MAX_FILE_BYTES)
        with tempfile.TemporaryDirectory(prefix="tool-", ignore_cleanup_errors=True) as directory:
            process = subprocess.Popen(  # noqa: S603 - arguments of our own; the code goes to standard input
                [sys.executable, "-I", "-B", str(_LAUNCHER), *map(str, limits)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": directory, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
            try:
                output, note = self._watched(process, encoded)
            finally:
                _kill_all(process)
        return self._result(process.returncode, output, note)

    def _watched(self, process: subprocess.Popen[bytes], code: bytes) -> tuple[str, str]:
        """Returns what the process printed until its end or a limit, and a note that names the limit."""
        assert process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + self._timeout_s
        try:
            process.stdin.write(code)  # the launcher reads all of it before it runs anything
            process.stdin.close()
        except BrokenPipeError:  # it did not start; its output says why
            pass
        collected, note = bytearray(), ""
        os.set_blocking(process.stdout.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not note:
                ended = _has_ended(process)  # asked first: what was printed before the end is read below
                selector.select(0 if ended else _POLL_S)
                chunk = _read(process.stdout.fileno())
                collected += chunk
                if len(collected) > 4 * self._max_output:
                    note = f"[stopped: more than {self._max_output} characters of output]"
                elif ended and not chunk:  # a process that it left behind may still hold the pipe
                    break
                elif time.monotonic() > deadline:
                    note = f"[stopped after {self._timeout_s:g} s]"
        return collected.decode("utf-8", "replace"), note

    def _result(self, status: int, output: str, note: str) -> ToolResult:
        if len(output) > self._max_output:
            output, note = output[: self._max_output], note or f"[cut after {self._max_output} characters]"
        if not note and status < 0:
            note = f"[stopped by {signal.Signals(-status).name}]"
        text = "\n".join(part for part in (output.rstrip("\n"), note) if part)
        return ToolResult(text, ok=not note and status == 0)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Tells whether it has ended, without taking its status: until then nobody else can get its number."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _READ_BYTES)
    except BlockingIOError:
        return b""


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and those that it started, unless they made a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
