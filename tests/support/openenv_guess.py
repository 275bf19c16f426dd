"""A real OpenEnv server: find a number. `python openenv_guess.py` prints its port and serves until it is killed."""

from __future__ import annotations

import random
import socket
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """A guess."""

    number: int
    note: str = ""


class Hint(Observation):
    """What is said about it."""

    text: str = ""


class GuessEnvironment(Environment):
    """The number follows from the seed; 13 breaks the environment."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, highest: int = 20, **_: Any) -> Hint:
        self._secret = random.Random(seed).randint(1, highest)
        return Hint(text=f"Guess from 1 to {highest}.", reward=None, done=False)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.number == 13:
            raise RuntimeError("13 is unlucky")
        found = action.number == self._secret
        text = "found" if found else "higher" if action.number < self._secret else "lower"
        return Hint(text=text, reward=float(found), done=found)

    @property
    def state(self) -> State:
        return State()


app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=8)

if __name__ == "__main__":
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])
