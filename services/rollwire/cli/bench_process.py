"""Processes of a benchmark: one that carries out commands, and the CPU time that processes have used."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from rollwire.serving.server import ServeError

_STOP_S: Final = 30.0
_PROC: Final = Path("/proc")

Commands = Mapping[str, Callable[..., Awaitable[Any]]]


class CommandProcess:
    """A child process that runs `answer_commands`.

    Attributes:
        pid: Its process id.
    """

    def __init__(self, pipe: Connection, pid: int) -> None:
        self._pipe = pipe
        self.pid = pid

    def call(self, name: str, *arguments: object, timeout_s: float) -> Any:
        """Carries out a command and returns its answer.

        Raises:
            ServeError: The process reports that it cannot start or go on, has ended, or gives no answer in time.
        """
        try:
            self._pipe.send((name, *arguments))
            if not self._pipe.poll(timeout_s):
                raise ServeError(f"a process of the benchmark gave no answer to {name} within {timeout_s:g} s")
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ServeError("a process of the benchmark has ended; see the messages above") from error
        if isinstance(answer, ServeError):
            raise answer
        return answer


@contextmanager
def command_process(
    target: Callable[..., None], *arguments: object, environment: Mapping[str, str]
) -> Iterator[CommandProcess]:
    """Runs `target(pipe, *arguments)` in a fresh process, which ends when the context does or when this process dies.

    Args:
        target: An importable function that carries out the commands that come through the pipe.
        arguments: Passed on to it.
        environment: All environment variables of the process.
    """
    here, there = get_context("spawn").Pipe()
    # Not a daemon: those may not start processes, as vLLM does.
    process = get_context("spawn").Process(target=target, args=(there, *arguments))
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    there.close()
    assert process.pid is not None
    try:
        yield CommandProcess(here, process.pid)
    finally:
        here.close()  # the process ends when it sees this
        process.join(_STOP_S)
        process.kill()
        process.join()


async def answer_commands(pipe: Connection, commands: Commands) -> None:
    """Carries out commands until the other end closes the pipe; a `ServeError` is an answer."""
    while True:
        try:
            name, *arguments = await asyncio.to_thread(pipe.recv)
        except (EOFError, OSError):
            return
        answer: Any
        try:
            answer = await commands[name](*arguments)
        except ServeError as error:
            answer = error
        with contextlib.suppress(BrokenPipeError):
            pipe.send(answer)


def tree_cpu_s(pid: int) -> tuple[float, float]:
    """Returns the CPU time in seconds that a process has used itself, and that its living descendants have used."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    parents, used = {}, {}
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # The name in parentheses may hold anything.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(entry.name)] = int(fields[1])
        used[int(entry.name)] = (int(fields[11]) + int(fields[12])) / ticks_per_s
    descendants = 0.0
    for process, seconds in used.items():
        ancestor = parents[process]
        while ancestor not in (0, pid):
            ancestor = parents.get(ancestor, 0)
        if ancestor == pid:
            descendants += seconds
    return used.get(pid, 0.0), descendants
