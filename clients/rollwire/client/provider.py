"""`serve_environment`: a user's own program serves environments to an environment server by dialling in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import grpc

from rollwire.client.provided import provided_environment
from rollwire.client.provider_sessions import ProviderSessions
from rollwire.client.provider_stream import ProviderConnection, ProviderSettings
from rollwire.rpc.errors import RollwireError
from rollwire.rpc.ids import new_secret

_log = logging.getLogger("rollwire.provider")
_MAX_ENVIRONMENTS: Final = 64
_MAX_CAPACITY: Final = 65_536
_PROGRAM_CHARACTERS: Final = 128
Factories = Mapping[str, Callable[..., Any]]


def serve_environment(
    target: str,
    environments: Factories,
    *,
    capacity: int = 64,
    max_turns: int | None = None,
    give_up_after_s: float = 300.0,
    drain_timeout_s: float = 30.0,
) -> None:
    """Serves environments until SIGTERM or Ctrl-C; the main function of a provider's program.

    The first signal lets running sessions end, a second one ends the process at once. Lines on standard error say when
    it attaches and when it cannot, unless the program configures Python's logging (`rollwire.provider`) by itself.

    Args:
        target: `host:port` of an environment server (`rollwire serve environment`).
        environments: Tag to class, or to a function that returns an environment. Its keyword arguments are the options
            that runs may set. An environment has `reset(seed)`, which returns (observation, info), and `step(action)`,
            which returns (observation, reward, terminated, truncated, info), with texts for observation and action;
            one of gymnasium's with such texts will do. docs/environments.md says what `info` may hold.
        capacity: Sessions at once, 1 to 65536; each may occupy a thread, and they share this process.
        max_turns: Turn limit of environments that name none (`max_turns`, or gymnasium's `spec.max_episode_steps`).
        give_up_after_s: Ends after so long without a connection; until then it tries again and sessions stay alive.
        drain_timeout_s: Longest time that running sessions get after the first signal.

    Raises:
        SystemExit: In the main thread, with one line for people: the server refuses a tag or cannot be reached, or an
            argument is wrong.
        RollwireError: The same from the server, in any other thread.
        ValueError: The same from the arguments, in any other thread.
    """
    _show_log()
    serving = serve_environment_async(
        target,
        environments,
        capacity=capacity,
        max_turns=max_turns,
        give_up_after_s=give_up_after_s,
        drain_timeout_s=drain_timeout_s,
        handle_signals=threading.current_thread() is threading.main_thread(),
    )
    if threading.current_thread() is not threading.main_thread():
        asyncio.run(serving)
        return
    try:
        asyncio.run(serving)
    except (ValueError, RollwireError) as error:
        sys.exit(f"rollwire: {error.message if isinstance(error, RollwireError) else error}")


async def serve_environment_async(
    target: str,
    environments: Factories,
    *,
    capacity: int = 64,
    max_turns: int | None = None,
    give_up_after_s: float = 300.0,
    drain_timeout_s: float = 30.0,
    stop: asyncio.Event | None = None,
    handle_signals: bool = False,
) -> None:
    """Serves environments as `serve_environment` does, inside a running event loop.

    Args:
        target: As in `serve_environment`, like all that are not named here.
        environments: See there.
        capacity: See there.
        max_turns: See there.
        give_up_after_s: See there.
        drain_timeout_s: See there.
        stop: Set it to let running sessions end and return.
        handle_signals: Take over SIGTERM and SIGINT; only in the main thread.

    Raises:
        RollwireError: The server refuses this provider, or could not be reached for too long.
        ValueError: An argument or an environment cannot be used.
    """
    _check(target, environments, capacity, give_up_after_s, drain_timeout_s)
    provided = {tag: provided_environment(tag, factory, max_turns) for tag, factory in environments.items()}
    sessions = ProviderSessions(provided, capacity)
    settings = ProviderSettings(capacity, give_up_after_s, drain_timeout_s, _program())
    descriptions = [environment.description for environment in provided.values()]
    connection = ProviderConnection(target, new_secret(), descriptions, sessions, settings)
    stop = stop or asyncio.Event()
    with _signals(stop, sessions) if handle_signals else contextlib.nullcontext():
        try:
            await connection.serve(stop)
        except RollwireError as error:
            if error.code is grpc.StatusCode.UNIMPLEMENTED:
                error.message = f"the server at {target} takes no providers; is it a Rollwire environment server?"
            raise


def _show_log() -> None:
    """Writes this client's log to standard error where the program has not said where it goes."""
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("rollwire: %(message)s"))
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)


def _check(target: str, environments: Factories, capacity: int, give_up_after_s: float, drain_timeout_s: float) -> None:
    host, colon, port = target.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ValueError(f"target is {target!r}; allowed: host:port, such as 127.0.0.1:7001")
    if not 1 <= len(environments) <= _MAX_ENVIRONMENTS:
        raise ValueError(f"environments has {len(environments)} tags; allowed: 1 to {_MAX_ENVIRONMENTS}")
    if not 1 <= capacity <= _MAX_CAPACITY:
        raise ValueError(f"capacity is {capacity}; allowed: 1 to {_MAX_CAPACITY}")
    for name, value in (("give_up_after_s", give_up_after_s), ("drain_timeout_s", drain_timeout_s)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}; allowed: 0 or more")


@contextlib.contextmanager
def _signals(stop: asyncio.Event, sessions: ProviderSessions) -> Iterator[None]:
    """Lets the first SIGTERM or SIGINT set `stop` and the second end the process."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        _log.warning("stopping: %d sessions run to their end; a second signal ends them now", len(sessions))
        stop.set()

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _program() -> str:
    name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    printable = "".join(character if character.isprintable() else "?" for character in name)
    return f"{printable} (pid {os.getpid()})"[:_PROGRAM_CHARACTERS]
