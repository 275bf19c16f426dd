"""`rollwire serve`: one server in this process. Imports only the service that it serves."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from rollwire.cli.arguments import split_arguments
from rollwire.serving.config import RunConfig, load_config
from rollwire.serving.logs import configure_logging
from rollwire.serving.server import Binding, ServeError, Service, serve_forever

_PR_SET_PDEATHSIG: Final = 1

Kind = Literal["environment", "rollout", "learner"]


@dataclass(frozen=True)
class ServeOptions:
    """Options of the command line, as `rollwire serve KIND --help` describes them.

    Attributes:
        parent_pid: Process that started this one and whose death ends it; None for a server that stands alone.
    """

    host: str
    port: int
    ready_file: Path | None
    insecure: bool
    debug_services: bool
    log_level: str
    parent_pid: int | None


def serve(kind: Kind, arguments: Sequence[str] | None, options: ServeOptions) -> None:
    """Serves until a signal. Raises `ConfigError` or `ServeError`."""
    if options.parent_pid is not None:
        die_with_parent(options.parent_pid)
    path, overrides = split_arguments(arguments)
    config = load_config(path, overrides)
    configure_logging(kind, level=options.log_level)
    if options.ready_file is not None and not options.ready_file.absolute().parent.is_dir():
        raise ServeError(f"--ready-file is {options.ready_file}: its directory does not exist")
    binding = Binding(
        host=options.host,
        port=options.port,
        insecure=options.insecure,
        ready_file=options.ready_file,
        debug_services=options.debug_services,
    )
    if kind == "learner":
        from rollwire.cli.serve_learner import serve_learner

        serve_learner(config, binding, arguments or (), options.log_level)
    else:
        asyncio.run(serve_forever(_make_service(kind, config), binding))


def _make_service(kind: Literal["environment", "rollout"], config: RunConfig) -> Service:
    if kind == "environment":
        from rollwire.environment.service import EnvironmentServer

        return EnvironmentServer(config)
    from rollwire.rollout.service import RolloutServer

    return RolloutServer(config)


def die_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process when the thread that started it ends, or ends it if that happened already.

    Raises:
        ServeError: The kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise ServeError(f"the kernel does not bind this process to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        raise ServeError(f"the process {parent_pid} that started this server is gone")
