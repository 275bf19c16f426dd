"""The sides of `rollwire bench environment`: what a call is on each, and windows in which all calls are repeated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from rollwire.cli.bench_environment_servers import (
    HOSTED_TAG,
    PROVIDED_TAG,
    ServerProcess,
    serve_echo,
    serve_openenv,
    serve_provider,
    serve_rollwire,
    server_process,
)
from rollwire.client.environment import EnvironmentClient
from rollwire.client.environment_stream import SessionStream
from rollwire.rpc.ids import new_id
from rollwire.serving.server import ServeError
from rollwire.v1 import environment_pb2 as pb

_ENDLESS_TURNS: Final = 10**9
_ATTACH_TIMEOUT_S: Final = 30.0
# As long as the reply of a turn on a 4x4 lake: 128 bytes with its observation and metrics.
_ECHO_TEXT: Final = "<answer>Right</answer>".ljust(128, ".")
_MOVES: Final = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
_BACK: Final = {"Left": "Right", "Right": "Left", "Up": "Down", "Down": "Up"}
_OPENING_AT_ONCE: Final = 64

Call = Callable[[], Awaitable[object]]
Sessions = EnvironmentClient | SessionStream


@dataclass(frozen=True)
class Window:
    """One measured window.

    Attributes:
        calls_per_s: Answered calls per second.
        server_cpu_us: CPU time of all processes of the side but the client, per call, in microseconds.
    """

    calls_per_s: float
    server_cpu_us: float


@dataclass
class Side:
    """One way to play turns.

    Attributes:
        name: For the table.
        calls: One for each session.
        processes: Those that serve.
        windows: What was measured.
    """

    name: str
    calls: Sequence[Call]
    processes: Sequence[ServerProcess]
    windows: list[Window] = field(default_factory=list)

    async def measure(self, seconds: float) -> Window:
        """Repeats every call for `seconds`, all of them concurrently."""
        answered = 0
        cpu_before, start = self._cpu_s(), time.perf_counter()
        end = start + seconds

        async def repeat(call: Call) -> None:
            nonlocal answered
            while True:  # once at least, however long the machine stood still
                await call()
                answered += 1
                if time.perf_counter() >= end:
                    return

        await asyncio.gather(*map(repeat, self.calls))
        elapsed = time.perf_counter() - start
        return Window(answered / elapsed, (self._cpu_s() - cpu_before) / answered * 1e6)

    def _cpu_s(self) -> float:
        return sum(process.cpu_s() for process in self.processes)


class Bench:
    """Starts servers and gives the sides that call them.

    Args:
        sessions: Sessions that play at once on each side.
        server_cores: Those that servers may use.
        client_cores: Those of this process; a provider dials in from outside, so it shares them.
        stack: Ends the servers.
    """

    def __init__(
        self, sessions: int, server_cores: Sequence[int], client_cores: Sequence[int], stack: AsyncExitStack
    ) -> None:
        self.sessions = sessions
        self._cores = server_cores
        self._client_cores = client_cores
        self._stack = stack

    async def echo(self) -> Side:
        """The bare unary echo."""
        process = await self._start(serve_echo)
        client = await self._stack.enter_async_context(EnvironmentClient(process.address))
        session_id = "0" * 32
        return Side("bare unary echo", [lambda: client.step(session_id, 0, _ECHO_TEXT)] * self.sessions, [process])

    async def rollwire(self) -> list[Side]:
        """The environment server: unary and stream, built-in, a user's class, and a provider's."""
        process = await self._start(serve_rollwire)
        provider = await self._stack.enter_async_context(
            server_process(serve_provider, process.address, cores=self._client_cores)
        )
        client = await self._stack.enter_async_context(EnvironmentClient(process.address))
        stream = await self._stack.enter_async_context(SessionStream(client))
        await _await_tag(client, PROVIDED_TAG)
        both = [process, provider]
        return [
            Side(UNARY, await walks(client, "FrozenLake", self.sessions), [process]),
            Side(PLAY, await walks(stream, "FrozenLake", self.sessions), [process]),
            Side(HOSTED, await walks(stream, HOSTED_TAG, self.sessions), [process]),
            Side(PROVIDED, await walks(stream, PROVIDED_TAG, self.sessions), both),
            Side(PROVIDED_UNARY, await walks(client, PROVIDED_TAG, self.sessions), both),
        ]

    async def openenv(self) -> list[Side]:
        """OpenEnv's server: turns in threads, and on its event loop."""
        from rollwire.cli.bench_environment_openenv import openenv_call, openenv_session

        sides = []
        for name, on_loop in ((OPENENV, False), (OPENENV_ON_LOOP, True)):
            process = await self._start(serve_openenv, on_loop)
            calls = []
            for number in range(self.sessions):
                session = await self._stack.enter_async_context(openenv_session(process.address))
                calls.append(await openenv_call(session, number, walk_of, _ENDLESS_TURNS))
            sides.append(Side(name, calls, [process]))
        return sides

    async def crowd(self, crowd: int) -> list[Side]:
        """Two servers: one with the usual number of sessions, one with a crowd of which few or all play."""
        sides = []
        for count in (self.sessions, crowd):
            process = await self._start(serve_rollwire)
            client = await self._stack.enter_async_context(EnvironmentClient(process.address))
            stream = await self._stack.enter_async_context(SessionStream(client))
            calls = await walks(stream, "FrozenLake", count)
            sides.append(Side(f"{count} open, all play", calls, [process]))
        few = Side(f"{crowd} open, {self.sessions} play", calls[: self.sessions], [process])
        return [sides[0], few, sides[1]]

    async def _start(self, serve: Callable[..., None], *arguments: object) -> ServerProcess:
        return await self._stack.enter_async_context(server_process(serve, *arguments, cores=self._cores))


UNARY: Final = "FrozenLake, unary Step"
PLAY: Final = "FrozenLake, Play"
HOSTED: Final = "a user's class, Play"
PROVIDED: Final = "a provider's class, Play"
PROVIDED_UNARY: Final = "a provider's class, unary Step"
OPENENV: Final = "OpenEnv"
OPENENV_ON_LOOP: Final = "OpenEnv, step_async"


async def measure(sides: Sequence[Side], seconds: float, repetitions: int) -> None:
    """Measures all sides in turns, in an order that rotates, after one window each that does not count."""
    for side in sides:
        await side.measure(min(seconds, 1.0))
    for repetition in range(repetitions):
        first = repetition % len(sides)
        for side in (*sides[first:], *sides[:first]):
            side.windows.append(await side.measure(seconds))


@asynccontextmanager
async def bench(sessions: int, server_cores: Sequence[int], client_cores: Sequence[int]) -> AsyncIterator[Bench]:
    """Gives a bench whose servers end with the context."""
    async with AsyncExitStack() as stack:
        yield Bench(sessions, server_cores, client_cores, stack)


async def walks(api: Sessions, tag: str, count: int) -> list[Call]:
    """Opens sessions of which each plays an endless walk."""
    calls: list[Call] = []
    for first in range(0, count, _OPENING_AT_ONCE):
        numbers = range(first, min(first + _OPENING_AT_ONCE, count))
        calls += await asyncio.gather(*(_walk_call(api, tag, number) for number in numbers))
    return calls


async def _walk_call(api: Sessions, tag: str, number: int) -> Call:
    """Opens a session whose player walks to and fro between two firm cells, so that the episode never ends."""
    seed = number * 1000
    while True:
        request = pb.OpenSessionRequest(request_id=new_id("bench"), environment_tag=tag, seed=seed)
        request.options.update({"max_steps": _ENDLESS_TURNS})
        request.lease.seconds = 3600
        opened = await api.open_session(request)
        walk = walk_of(opened.observation)
        if walk is not None:
            break
        await api.close_session(opened.session_id)
        seed += 1
    turn = 0

    async def step() -> None:
        nonlocal turn
        response = await api.step(opened.session_id, turn, walk[turn % 2])
        if response.HasField("failure") or response.terminated or response.truncated:
            raise RuntimeError(f"the walk of session {number} ended: {response}")
        turn += 1

    return step


def walk_of(observation: str) -> tuple[str, str] | None:
    """Returns two opposite moves between the player's cell and an empty neighbour, if there is one."""
    rows = observation.splitlines()
    row = next(index for index, line in enumerate(rows) if "P" in line)
    column = rows[row].index("P")
    for name, (down, right) in _MOVES.items():
        there = (row + down, column + right)
        if 0 <= there[0] < len(rows) and 0 <= there[1] < len(rows[0]) and rows[there[0]][there[1]] == "_":
            return f"<answer>{name}</answer>", f"<answer>{_BACK[name]}</answer>"
    return None


async def _await_tag(client: EnvironmentClient, tag: str) -> None:
    """Waits until a provider has attached."""
    try:
        async with asyncio.timeout(_ATTACH_TIMEOUT_S):
            while tag not in [entry.tag for entry in (await client.list_environments()).environments]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError as error:
        raise ServeError(f"the provider of the benchmark did not attach within {_ATTACH_TIMEOUT_S:g} s") from error
