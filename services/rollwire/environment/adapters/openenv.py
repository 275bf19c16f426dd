"""Environments of an OpenEnv server: one WebSocket per session, closed with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar, Final, Literal
from urllib.parse import urlsplit

from rollwire.environment.adapters.libraries import require, seed_of_32_bits
from rollwire.environment.answers import AnswerReader

StepReply = tuple[str, float, bool, bool, dict[str, Any]]
_MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
_WHOLE_ANSWER = r"^(.*)$"
_Read = Literal["text", "integer", "number", "json"]


class OpenEnvError(Exception):
    """The OpenEnv server cannot be reached, refuses, or answers outside its protocol."""


class OpenEnv:
    """An environment that an OpenEnv server plays; the server is a process of its own, so this client needs none."""

    isolation: ClassVar = "thread"
    # The server's address is not for callers to choose.
    config_only_options: ClassVar = ("url", "action_field", "action_constants", "action_pattern", "reset_options")

    def __init__(
        self,
        url: str,
        max_turns: int,
        action_field: str = "message",
        actions: dict[str, Any] | None = None,
        action_type: _Read = "text",
        action_pattern: str = _WHOLE_ANSWER,
        action_constants: dict[str, Any] | None = None,
        observation_field: str = "",
        reset_options: dict[str, Any] | None = None,
        instructions: str = "",
        format_penalty: float = 0.0,
        success_reward: float | None = None,
        connect_timeout_s: float = 10.0,
        reply_timeout_s: float = 50.0,
    ) -> None:
        """Checks the settings; `reset` connects.

        Args:
            url: Address of the server: `http://`, `https://`, `ws://` or `wss://`, such as `http://127.0.0.1:8000`.
            max_turns: Turn limit.
            action_field: Field of the server's action that takes the answer; empty: the answer is the whole action.
            actions: Words, in any case, to values of that field. Not set: any answer of the type.
            action_type: What an answer is read as, where `actions` is not set.
            action_pattern: Regular expression whose last group is the answer; the default takes the whole response.
            action_constants: Further fields of every action.
            observation_field: Field of the observation that is shown; empty: all of it, as JSON.
            reset_options: Further arguments of a reset, beside the seed.
            instructions: Instructions for the whole episode.
            format_penalty: Reward of a turn whose answer cannot be read; the server does not see that turn.
            success_reward: An episode that ends with this reward in its last turn, or more, is a success; not set:
                there is no metric `success`.
            connect_timeout_s: Longest time to connect.
            reply_timeout_s: Longest time for a reply; keep it below the definition's `step_timeout_s`.

        Raises:
            ImportError: websockets is not installed.
            ValueError: A setting is out of range.
        """
        self._websockets = require("websockets.sync.client", "openenv")
        self._errors = require("websockets.exceptions", "openenv")
        self._url = _websocket_url(url)
        self.max_turns = max_turns
        self._field = action_field
        self._actions = None if actions is None else {word.strip().lower(): value for word, value in actions.items()}
        self._type = action_type
        self._answers = AnswerReader(action_pattern, ())
        self._constants = action_constants or {}
        self._observation_field = observation_field
        self._reset_options = reset_options or {}
        self._instructions = instructions
        self.format_penalty, self.success_reward = format_penalty, success_reward
        self._connect_timeout_s, self._reply_timeout_s = connect_timeout_s, reply_timeout_s
        self.metrics_agg_mode = {"action_is_valid": "mean", "format_penalty": "mean"}
        if success_reward is not None:
            self.metrics_agg_mode["success"] = "last"
        self._connection = ExitStack()
        self._socket: Any = None
        self._text = ""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Connects and starts an episode; the seed is folded to 32 bits."""
        try:
            connection = self._websockets.connect(
                self._url,
                open_timeout=self._connect_timeout_s,
                close_timeout=1.0,
                max_size=_MAX_MESSAGE_BYTES,
                proxy=None,
            )
            self._socket = self._connection.enter_context(connection)
        except (OSError, self._errors.WebSocketException) as error:
            raise OpenEnvError(f"no OpenEnv server answers at {self._url}: {type(error).__name__}: {error}") from error
        reply = self._called("reset", {"seed": seed_of_32_bits(seed), **self._reset_options})
        self._text = self._observed(reply)
        return self._text, {"instructions": self._instructions}

    def step(self, action: str) -> StepReply:
        """Plays one turn."""
        valid, value = self._value(action)
        reward, done = self.format_penalty, False
        if valid:
            reply = self._called("step", self._message(value))
            reward, done = _reward(reply), bool(reply.get("done"))
            self._text = self._observed(reply)
        metrics = {"action_is_valid": float(valid), "format_penalty": 0.0 if valid else self.format_penalty}
        if self.success_reward is not None:
            metrics["success"] = float(done and reward >= self.success_reward)
        return self._text, reward, done, False, {"metrics": metrics}

    def close(self) -> None:
        """Ends the session on the server."""
        self._connection.close()

    def _message(self, value: Any) -> dict[str, Any]:
        if self._field:
            return {**self._constants, self._field: value}
        return {**self._constants, **value}

    def _value(self, action: str) -> tuple[bool, Any]:
        """Returns whether a response holds an answer, and the answer as the server wants it."""
        answer = self._answers.read(action)
        if answer is None:
            return False, None
        if self._actions is not None:
            word = answer.lower()
            return word in self._actions, self._actions.get(word)
        try:
            value = _READERS[self._type](answer)
        except (ValueError, RecursionError):
            return False, None
        return bool(self._field) or isinstance(value, dict), value

    def _called(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sends a message and returns what its reply holds."""
        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            message = json.loads(self._socket.recv(timeout=self._reply_timeout_s))
        except TimeoutError as error:
            raise OpenEnvError(f"no reply to {kind} within {self._reply_timeout_s:g} s") from error
        except (OSError, self._errors.WebSocketException) as error:
            raise OpenEnvError(f"the connection broke during {kind}: {type(error).__name__}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise OpenEnvError(f"the reply to {kind} is no JSON: {error}") from error
        found = message.get("data") if isinstance(message, dict) else None
        if not isinstance(found, dict):
            raise OpenEnvError(f"the reply to {kind} is {str(message)[:200]!r}; allowed: an object with type and data")
        if message.get("type") != "observation":
            told = f"{found.get('code', 'no code')}: {found.get('message', 'no message')}: {found.get('errors', '')}"
            raise OpenEnvError(f"the server answers {kind} with {message.get('type')!r:.40}: {told:.500}")
        return found

    def _observed(self, reply: Mapping[str, Any]) -> str:
        found = reply.get("observation")
        if self._observation_field:
            if not isinstance(found, dict) or self._observation_field not in found:
                fields = ", ".join(found) if isinstance(found, dict) else "none"
                raise OpenEnvError(f"the observation has no field {self._observation_field!r}; it has: {fields}")
            found = found[self._observation_field]
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def _websocket_url(url: str) -> str:
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme)
    if scheme is None or not parts.hostname:
        raise ValueError(f"url is {url!r}; allowed: http, https, ws or wss, such as http://127.0.0.1:8000")
    path = parts.path.rstrip("/")
    return f"{scheme}://{parts.netloc}{path if path.endswith('/ws') else f'{path}/ws'}"


def _reward(reply: Mapping[str, Any]) -> float:
    """Returns the reward of a turn; OpenEnv's servers leave it out where there is none."""
    reward = reply.get("reward")
    if reward is None:
        return 0.0
    if not isinstance(reward, int | float):
        raise OpenEnvError(f"the reward is {reward!r:.100}; allowed: a number")
    return float(reward)


_READERS: Final[dict[str, Callable[[str], Any]]] = {"text": str, "integer": int, "number": float, "json": json.loads}
