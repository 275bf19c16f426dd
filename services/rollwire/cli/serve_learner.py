"""`rollwire serve learner`: rank 0 serves, the other ranks follow it.

Ranks that torchrun started find their number in the environment. Otherwise this process is rank 0 and starts the others
on this host, with the same environment variables; they end when it ends, however it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from rollwire.cli.errors import FAILED, show
from rollwire.learner.rank_watch import RankFailure
from rollwire.learner.seats import Seat, find_seat
from rollwire.learner.service import LearnerServer
from rollwire.rpc.errors import RollwireError
from rollwire.serving.config import RunConfig
from rollwire.serving.server import Binding, ServeError, serve_forever

_LOOPBACK: Final = "127.0.0.1"
_END_GRACE_S: Final = 5.0
_POLL_S: Final = 0.05


def serve_learner(config: RunConfig, binding: Binding, arguments: Sequence[str], log_level: str) -> None:
    """Serves as rank 0, or follows as another rank.

    Args:
        config: The run.
        binding: Where rank 0 listens.
        arguments: Configuration file and overrides, as on this command line.
        log_level: Least level that is logged.

    Raises:
        ServeError: The server cannot start, or cannot go on.
    """
    seat = find_seat()
    if seat is not None and seat.rank > 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; rank 0 decides
        from rollwire.learner.follower import run_follower

        run_follower(config, seat)
    if seat is not None or config.learner.world_size == 1:
        _serve(LearnerServer(config, seat or Seat()), binding)
        return
    with _other_ranks(config.learner.world_size, arguments, log_level) as (seat, ended):
        _serve(LearnerServer(config, seat, ended), binding)


def _serve(server: LearnerServer, binding: Binding) -> None:
    try:
        asyncio.run(serve_forever(server, binding))
    except (ServeError, RollwireError) as error:
        if not server.rank_failed:
            raise
        show(error.message if isinstance(error, RollwireError) else str(error))
        sys.stderr.flush()
        os._exit(FAILED)  # the thread that computes may be stuck in an operation with a rank that is gone


@contextmanager
def _other_ranks(
    size: int, arguments: Sequence[str], log_level: str
) -> Iterator[tuple[Seat, Callable[[], list[RankFailure]]]]:
    """Starts ranks 1 to `size` - 1 and ends them.

    Yields:
        The seat of this process, and a function that returns the ranks that have ended.
    """
    store, port = _serve_store()
    processes = {rank: _start_rank(rank, size, port, arguments, log_level) for rank in range(1, size)}

    def ended() -> list[RankFailure]:
        return [
            RankFailure(rank, f"its process {_how(process.returncode)}")
            for rank, process in processes.items()
            if process.poll() is not None
        ]

    try:
        yield Seat(0, size, 0, _LOOPBACK, port, store_exists=True), ended
    finally:
        _end_all(list(processes.values()))
        del store


def _serve_store() -> tuple[Any, int]:
    """Serves the store of the ranks on a free port that only this host reaches; it ends with the object returned."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.socket() as listener:
        listener.bind((_LOOPBACK, 0))
        listener.listen()
        port = int(listener.getsockname()[1])
        store = TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def _start_rank(rank: int, size: int, port: int, arguments: Sequence[str], log_level: str) -> subprocess.Popen[bytes]:
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    command = [sys.executable, "-P", "-m", "rollwire.cli.main", "serve", "learner", *arguments]
    return subprocess.Popen(  # noqa: S603 - this very program with the arguments that it got itself
        [*command, f"--log-level={log_level}", f"--parent-pid={os.getpid()}"],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **{name: str(value) for name, value in variables.items()}},
    )


def _end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """Waits for ranks that rank 0 has told to end, and kills those that do not."""
    end = time.monotonic() + _END_GRACE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(_POLL_S)
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def _how(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
