"""Starts the servers of a run as child processes on this host and makes sure that none outlives it.

Every child leads a session of its own, so that Ctrl-C in the terminal reaches the coordinator alone, and asks the
kernel to be killed when the process that started it dies (`--parent-pid`): even a SIGKILL of the launcher leaves no
orphan.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal, get_args

from rollwire.coordinator.errors import ERROR_PREFIX, RunError
from rollwire.coordinator.run_dir import CONFIG_FILE, RunDir
from rollwire.serving.config import RunConfig
from rollwire.serving.config.sections import ServicesSection

Kind = Literal["environment", "learner", "rollout"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

STOP_GRACE_S: Final = 10.0
"""Time that children get to end after SIGTERM."""

_POLL_S: Final = 0.05
_SHOWN_LINES: Final = 10
_SHOWN_CHARS: Final = 300
_READ_BYTES: Final = 64 * 1024

# Keeping freed memory instead of returning it halves the CPU time of receiving weights. Read before Python starts.
ALLOCATOR_ENVIRONMENT: Final = {
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "67108864",
    "MALLOC_ARENA_MAX": "1",
}


@dataclass
class Child:
    """One server process.

    Attributes:
        kind: Kind of server.
        process: The process, leader of its own session.
        log_file: Where its output goes.
        log_begin: Bytes that earlier processes of a resumed run wrote there.
        ready_file: Appears when its port is bound.
    """

    kind: Kind
    process: asyncio.subprocess.Process
    log_file: Path
    log_begin: int
    ready_file: Path


def ready_file_of(kind: Kind, run_dir: Path) -> Path:
    """Returns the file that appears when a server has bound its port; it holds the address."""
    return run_dir / f"{kind}.json"


def child_command(kind: Kind, run_dir: Path) -> list[str]:
    """Returns the command line of a server: what it writes belongs into the run's directory."""
    return [
        sys.executable,
        "-P",  # as with the `rollwire` script, the working directory is no place to import from
        "-m",
        "rollwire.cli.main",
        "serve",
        kind,
        str(run_dir / CONFIG_FILE),
        f"run.output_dir={run_dir}",
        "--port=0",
        f"--ready-file={ready_file_of(kind, run_dir)}",
        f"--parent-pid={os.getpid()}",
    ]


def child_environment(kind: Kind, config: RunConfig) -> dict[str, str]:
    """Returns the environment variables of a server."""
    variables = {**os.environ, **ALLOCATOR_ENVIRONMENT, "PYTHONUNBUFFERED": "1"}
    threads = {"rollout": config.rollout.torch_threads, "learner": config.learner.torch_threads}.get(kind, 1)
    if threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    return variables


class LocalLauncher:
    """The children of one run. `start`, then `watch` beside the run, and `stop` whatever happens.

    Args:
        config: The run.
        run_dir: Its directory.
        command: Returns the command line of a server from its kind and the run's directory.
        kinds: Which servers to start.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        command: Callable[[Kind, Path], list[str]] = child_command,
        kinds: Sequence[Kind] = KINDS,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._command = command
        self._kinds = kinds
        self._children: list[Child] = []

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids by kind."""
        return {child.kind: child.process.pid for child in self._children}

    async def start(self) -> ServicesSection:
        """Starts all servers and returns their addresses once their ports are bound.

        Raises:
            RunError: A server ended or did not bind a port in time.
        """
        for kind in self._kinds:
            self._children.append(await self._spawn(kind))
        end = asyncio.get_running_loop().time() + self._config.timeouts.ready_s
        waiting = list(self._children)
        while waiting:
            self._raise_if_dead()
            waiting = [child for child in waiting if not child.ready_file.exists()]
            if waiting and asyncio.get_running_loop().time() > end:
                raise RunError(
                    f"the {waiting[0].kind} server bound no port within timeouts.ready_s="
                    f"{self._config.timeouts.ready_s:g} s; its log is {waiting[0].log_file}"
                )
            await asyncio.sleep(_POLL_S)
        return ServicesSection.model_validate(
            {child.kind: [json.loads(child.ready_file.read_text())["address"]] for child in self._children}
        )

    async def watch(self) -> None:
        """Waits until a server ends, which none may while the run goes on; raises `RunError` with its last words."""
        await asyncio.wait(
            [asyncio.ensure_future(child.process.wait()) for child in self._children],
            return_when=asyncio.FIRST_COMPLETED,
        )
        self._raise_if_dead()

    def death(self) -> RunError | None:
        """Returns what to tell about a server that has ended; None while all run."""
        for child in self._children:
            if child.process.returncode is not None:
                return RunError(_obituary(child, child.process.returncode))
        return None

    async def stop(self) -> None:
        """Asks all servers to end, waits, and kills what is left of them."""
        for child in self._children:
            if child.process.returncode is None:
                child.process.terminate()
        waits = [asyncio.ensure_future(child.process.wait()) for child in self._children]
        if waits:
            await asyncio.wait(waits, timeout=STOP_GRACE_S)
        self.kill()
        for child in self._children:
            await child.process.wait()
            child.ready_file.unlink(missing_ok=True)

    def kill(self) -> None:
        """Kills all servers at once, with everything that they started."""
        for child in self._children:
            try:
                os.killpg(child.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    async def _spawn(self, kind: Kind) -> Child:
        log_file = self._run_dir.log_dir / f"{kind}.log"
        ready_file = ready_file_of(kind, self._run_dir.path)
        ready_file.unlink(missing_ok=True)  # of a process that was killed
        with open_log(log_file) as log:
            log_begin = log.tell()
            process = await asyncio.create_subprocess_exec(
                *self._command(kind, self._run_dir.path),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(kind, self._config),
                start_new_session=True,
            )
        return Child(kind, process, log_file, log_begin, ready_file)

    def _raise_if_dead(self) -> None:
        death = self.death()
        if death is not None:
            raise death


def open_log(path: Path) -> BinaryIO:
    """Opens a log of a run, to go on with it. Raises `RunError`."""
    try:
        return path.open("ab")
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}; check space and permissions") from error


def _obituary(child: Child, status: int) -> str:
    """Says which server ended, how, and its own last words."""
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    lines = _last_lines(child.log_file, child.log_begin)
    errors = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
    if errors:
        return f"the {child.kind} server {how}: {errors[-1]}"
    shown = "".join(f"\n  {_readable(line)}" for line in lines[-_SHOWN_LINES:])
    return f"the {child.kind} server {how}; its log is {child.log_file}{', which ends:' if shown else ''}{shown}"


def _last_lines(path: Path, begin: int) -> list[str]:
    with path.open("rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(begin, log.tell() - _READ_BYTES))
        return log.read().decode(errors="replace").splitlines()


def _readable(line: str) -> str:
    """Returns a log line for people: of a JSON line its level, its event and the rest as `key=value`; cut when long."""
    try:
        fields = json.loads(line)
        head = f"{fields.pop('level')}: {fields.pop('event')}"
    except (ValueError, KeyError, AttributeError, TypeError):
        return line[:_SHOWN_CHARS]
    for name in ("timestamp", "service", "module"):
        fields.pop(name, None)
    return " ".join([head, *(f"{name}={value}" for name, value in fields.items())])[:_SHOWN_CHARS]
