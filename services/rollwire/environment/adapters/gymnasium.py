"""Environments of gymnasium with discrete actions, as text: words become actions, drawings become observations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rollwire.environment.adapters.libraries import require
from rollwire.environment.answers import ANSWER_PATTERN, AnswerReader

StepReply = tuple[str, float, bool, bool, dict[str, Any]]
_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")
_MOST_LISTED_ACTIONS = 64


class Gymnasium:
    """An environment of gymnasium whose actions are discrete and which draws itself as text or has a short state."""

    isolation = "process"
    sessions_per_process = 16  # its environments draw from generators of their own
    config_only_options = ("id", "kwargs", "actions", "action_pattern", "observation_template")

    def __init__(
        self,
        id: str,
        kwargs: dict[str, Any] | None = None,
        actions: dict[str, int] | list[str] | None = None,
        action_pattern: str = ANSWER_PATTERN,
        observation: Literal["auto", "ansi", "value"] = "auto",
        observation_template: str = "",
        colours: Literal["mark", "strip"] = "mark",
        instructions: str = "",
        format_penalty: float = 0.0,
        max_turns: int | None = None,
        success_reward: float | None = None,
    ) -> None:
        """Makes the environment; call `reset` before the first turn.

        Args:
            id: Its name in gymnasium's registry, such as `Taxi-v4`; `module:Name-v0` imports a module first.
            kwargs: Keyword arguments for `gymnasium.make`.
            actions: Words for actions, in any case: a mapping to the numbers, or a list in their order. Not set: the
                numbers themselves.
            action_pattern: Regular expression whose last group is the word.
            observation: `ansi`: what `render()` draws; `value`: the observation itself; `auto`: the former where the
                environment can draw itself as text.
            observation_template: With `value`: Python's format string; `{0}` or `{name}` are parts of the observation.
            colours: Colours of a drawing: `mark` writes them as `red[S]`, `strip` leaves them out.
            instructions: Instructions before the list of actions.
            format_penalty: Reward of a turn without an action; such a turn changes nothing.
            max_turns: Turn limit; not set: the one that gymnasium has for it.
            success_reward: An episode that terminates with this reward in its last turn, or more, is a success; not
                set: there is no metric `success`.

        Raises:
            ImportError: gymnasium is not installed.
            ValueError: The environment or a setting does not fit.
        """
        gymnasium = require("gymnasium", "gymnasium")
        self._env = _made(gymnasium, id, kwargs or {}, observation)
        self._drawn = self._env.render_mode == "ansi"
        self._actions = _words(gymnasium, id, self._env.action_space, actions)
        self._answers = AnswerReader(action_pattern)
        self._template = observation_template
        self._colours = colours
        self.format_penalty = format_penalty
        self.success_reward = success_reward
        self.max_turns = _turn_limit(id, self._env.spec, max_turns)
        self.metrics_agg_mode = {"action_is_valid": "mean", "format_penalty": "mean"}
        if success_reward is not None:
            self.metrics_agg_mode["success"] = "last"
        self._instructions = _instructions(id, list(self._actions), instructions)
        self._text = ""
        if observation_template and not self._drawn:
            self._checked_template()

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Starts an episode; gymnasium takes the seed as it is."""
        value, _ = self._env.reset(seed=seed)
        self._text = self._observed(value)
        return self._text, {"instructions": self._instructions}

    def step(self, action: str) -> StepReply:
        """Plays one turn. A response without an action is a turn that only costs the penalty."""
        number = self._actions.get((self._answers.read(action) or "").lower())
        terminated = truncated = False
        reward = self.format_penalty
        if number is not None:
            value, earned, terminated, truncated, _ = self._env.step(number)
            reward = float(earned)
            self._text = self._observed(value)
        metrics = {
            "action_is_valid": float(number is not None),
            "format_penalty": self.format_penalty if number is None else 0.0,
        }
        if self.success_reward is not None:
            metrics["success"] = float(terminated and reward >= self.success_reward)
        return self._text, reward, bool(terminated), bool(truncated), {"metrics": metrics}

    def render_text(self) -> str:
        """Returns the latest observation."""
        return self._text

    def close(self) -> None:
        """Frees what the environment holds."""
        self._env.close()

    def _observed(self, value: object) -> str:
        if self._drawn:
            drawing = str(self._env.render())
            return (_marked(drawing) if self._colours == "mark" else _ESCAPE.sub("", drawing)).strip("\n")
        plain = _plain(value)
        if self._template:
            parts = plain if isinstance(plain, list) else [plain]
            return self._template.format(*parts, **(plain if isinstance(plain, dict) else {}))
        return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)

    def _checked_template(self) -> None:
        sample = self._env.observation_space.sample()
        try:
            self._observed(sample)
        except (LookupError, ValueError, AttributeError) as error:
            raise ValueError(
                f"observation_template {self._template!r:.200} does not fit an observation such as {_plain(sample)}: "
                f"{type(error).__name__}: {error}"
            ) from error


def _made(gymnasium: Any, id: str, kwargs: Mapping[str, Any], observation: str) -> Any:
    try:
        spec = gymnasium.spec(id)
        creator = spec.entry_point
        if isinstance(creator, str):
            creator = gymnasium.envs.registration.load_env_creator(creator)
        modes = list(getattr(creator, "metadata", {}).get("render_modes", ()))
        if observation == "ansi" and "ansi" not in modes:
            raise ValueError(
                f"observation is 'ansi', but {id} draws itself only as {', '.join(modes) or 'nothing'}; use 'value'"
            )
        drawn = {"render_mode": "ansi"} if observation != "value" and "ansi" in modes else {}
        return gymnasium.make(spec, disable_env_checker=True, **{**drawn, **kwargs})
    except gymnasium.error.Error as error:
        raise ValueError(f"id is {id!r}: {' '.join(str(error).split())}") from error


def _words(gymnasium: Any, id: str, space: Any, actions: Mapping[str, int] | Sequence[str] | None) -> dict[str, int]:
    """Returns words in lower case to actions."""
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ValueError(f"{id} has the actions {space}; allowed: an environment with discrete actions")
    numbers = range(int(space.start), int(space.start) + int(space.n))
    if actions is None:
        return {str(number): number for number in numbers}
    if not isinstance(actions, Mapping):
        if len(actions) != len(numbers):
            raise ValueError(f"actions has {len(actions)} words, but {id} has {len(numbers)} actions")
        actions = dict(zip(actions, numbers, strict=True))
    found = {word.strip().lower(): number for word, number in actions.items()}
    if len(found) != len(actions) or "" in found:
        raise ValueError(f"actions has the words {list(actions)}; allowed: different ones, in any case, none empty")
    for word, number in actions.items():
        if number not in numbers:
            raise ValueError(f"actions.{word} is {number}; allowed: {numbers[0]} to {numbers[-1]}, as {id} has them")
    return found


def _turn_limit(id: str, spec: Any, max_turns: int | None) -> int:
    found = max_turns if max_turns is not None else getattr(spec, "max_episode_steps", None)
    if found is None:
        raise ValueError(f"max_turns is not set, and gymnasium has no limit for {id}; set it")
    return int(found)


def _instructions(id: str, words: Sequence[str], given: str) -> str:
    shown = [word.capitalize() for word in words[:_MOST_LISTED_ACTIONS]]
    more = ", …" if len(words) > len(shown) else ""
    text = given or f"You are playing {id}. Answer with one action in a turn, format is <answer>{shown[0]}</answer>"
    return f"{text}\nYour available actions are:\n{', '.join(shown)}{more}"


def _plain(value: Any) -> Any:
    """Turns an observation into what JSON has."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def _marked(drawing: str) -> str:
    """Writes coloured pieces as `colour[piece]`: a drawing may say with colours alone where the player is."""
    pieces, colour, position = [], "", 0
    for escape in _ESCAPE.finditer(drawing):
        piece = drawing[position : escape.start()]
        pieces.append(f"{colour}[{piece}]" if colour and piece else piece)
        colour = _colour(escape.group(1))
        position = escape.end()
    return "".join(pieces) + drawing[position:]


def _colour(codes: str) -> str:
    for code in codes.split(";"):
        if code.isdigit() and int(code) // 10 in (3, 4) and int(code) % 10 < len(_COLOURS):
            return _COLOURS[int(code) % 10]
    return ""
