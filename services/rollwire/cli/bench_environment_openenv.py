"""FrozenLake behind OpenEnv's own server class, and a lean client of it; only with openenv-core (extra `bench`)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import websockets.asyncio.client as websockets
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field

from rollwire.environment.frozen_lake import FrozenLake


class Answer(Action):  # type: ignore[misc]
    """What the policy answered."""

    text: str


class View(Observation):  # type: ignore[misc]
    """What it sees, and the metrics of the turn."""

    text: str
    instructions: str = ""
    truncated: bool = False
    metrics: dict[str, float] = Field(default_factory=dict)


class OpenEnvLake(Environment):  # type: ignore[misc]
    """The very class that Rollwire serves, in OpenEnv's shape. Turns run in a thread of the session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._lake = FrozenLake()

    def reset(self, seed: int | None = None, episode_id: str | None = None, max_steps: int = 10) -> View:
        """Starts an episode."""
        self._lake = FrozenLake(max_steps=max_steps)
        text, info = self._lake.reset(seed or 0)
        return View(text=text, instructions=info["instructions"], done=False, reward=None)

    def step(self, action: Answer, timeout_s: float | None = None) -> View:
        """Plays a turn."""
        text, reward, terminated, truncated, info = self._lake.step(action.text)
        done = terminated or truncated
        return View(text=text, reward=reward, done=done, truncated=truncated, metrics=info["metrics"])

    @property
    def state(self) -> State:
        """OpenEnv asks for one; nothing reads it here."""
        return State()


class OpenEnvLakeOnLoop(OpenEnvLake):
    """The same, with turns on the event loop: the fastest that OpenEnv offers."""

    async def step_async(self, action: Answer, timeout_s: float | None = None) -> View:
        """Plays a turn."""
        return self.step(action)


def openenv_app(on_loop: bool, capacity: int) -> Any:
    """Returns the ASGI application."""
    lake = OpenEnvLakeOnLoop if on_loop else OpenEnvLake
    return create_fastapi_app(lake, Answer, View, max_concurrent_envs=capacity)


class OpenEnvSession:
    """A session over a WebSocket of its own, as OpenEnv has it."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    async def reset(self, seed: int, max_steps: int) -> str:
        """Starts an episode; returns the observation."""
        reply = await self._ask("reset", {"seed": seed, "max_steps": max_steps})
        text: str = reply["observation"]["text"]
        return text

    async def step(self, action: str) -> bool:
        """Plays a turn; returns whether the episode has ended."""
        reply = await self._ask("step", {"text": action})
        return bool(reply["done"])

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(await self._socket.recv())
        if reply["type"] != "observation":
            raise RuntimeError(f"OpenEnv answered {reply}")
        found: dict[str, Any] = reply["data"]
        return found


@asynccontextmanager
async def openenv_session(address: str) -> AsyncIterator[OpenEnvSession]:
    """Opens a session; without compression, which OpenEnv's own client has on and which costs more than it saves."""
    async with websockets.connect(f"ws://{address}/ws", compression=None, proxy=None, close_timeout=1) as socket:
        yield OpenEnvSession(socket)


Walk = Callable[[str], tuple[str, str] | None]


async def openenv_call(
    session: OpenEnvSession, number: int, walk_of: Walk, max_steps: int
) -> Callable[[], Awaitable[None]]:
    """Returns a call that plays the next turn of an endless walk between two firm cells."""
    seed = number * 1000
    while (walk := walk_of(await session.reset(seed, max_steps))) is None:
        seed += 1
    turn = 0

    async def step() -> None:
        nonlocal turn
        if await session.step(walk[turn % 2]):
            raise RuntimeError(f"the walk of session {number} ended")
        turn += 1

    return step
