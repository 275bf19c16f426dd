"""Environments of GEM (the package gem-llm). Its environments seed global generators: one process per session."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollwire.environment.adapters.libraries import require, seed_of_32_bits

StepReply = tuple[str, float, bool, bool, dict[str, Any]]
_SINGLE_TURN = ("rg:", "math:", "code:", "logic:", "qa:", "eval:")


class Gem:
    """An environment of GEM, by its id."""

    isolation = "process"  # one session each: resets seed global generators
    config_only_options = ("id", "kwargs", "modules")

    def __init__(
        self,
        id: str,
        kwargs: dict[str, Any] | None = None,
        modules: Sequence[str] = (),
        max_turns: int | None = None,
        success_reward: float = 1.0,
    ) -> None:
        """Makes the environment; call `reset` before the first turn.

        Args:
            id: Its id in GEM's registry, such as `game:GuessTheNumber-v0-easy` or `rg:leg_counting`.
            kwargs: Keyword arguments for `gem.make`.
            modules: Modules to import first, which register environments of your own with `gem.register`.
            max_turns: Turn limit; not set: the environment's own, and 1 for data sets.
            success_reward: An episode that terminates with this reward in its last turn, or more, is a success.

        Raises:
            ImportError: gem-llm or one of the modules is not installed.
            ValueError: GEM has no such environment, or a setting does not fit.
        """
        gem = require("gem", "gem")
        require("gem.envs", "gem")  # registers GEM's own environments
        for module in modules:
            require(module, "gem")
        known = require("gem.envs.registration", "gem").ENV_REGISTRY
        if id not in known:
            near = difflib.get_close_matches(id, known, n=3, cutoff=0.4)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"id is {id!r}, which GEM does not know{hint}")
        self._env = gem.make(id, **(kwargs or {}))
        self._id = id
        self._max_turns = max_turns
        self.success_reward = success_reward
        self.max_turns = self._turn_limit()
        self.metrics_agg_mode = {"success": "last"}

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Starts an episode; the seed is folded to the 32 bits that GEM takes."""
        observation, info = self._env.reset(seed=seed_of_32_bits(seed))
        self.max_turns = self._turn_limit()  # some draw theirs anew
        told = {"instructions": info["env_instruction"]} if "env_instruction" in info else {}
        return observation, {**told, **_suffix(info)}

    def step(self, action: str) -> StepReply:
        """Plays one turn. What an unusable response costs is the environment's affair: most of GEM's end with -0.1."""
        observation, reward, terminated, truncated, info = self._env.step(action)
        success = bool(terminated) and reward >= self.success_reward
        reported = info.get("metrics", {})
        metrics = {"success": float(success), **{name: value for name, value in reported.items() if _is_finite(value)}}
        modes = {"metrics_agg_mode": info["metrics_agg_mode"]} if "metrics_agg_mode" in info else {}
        return (
            observation,
            float(reward),
            bool(terminated),
            bool(truncated),
            {
                "metrics": metrics,
                **modes,
                **_suffix(info),
            },
        )

    def close(self) -> None:
        """Frees what the environment holds."""
        close = getattr(self._env, "close", None)
        if callable(close):
            close()

    def _turn_limit(self) -> int:
        own = getattr(self._env, "max_turns", None)
        found = self._max_turns if self._max_turns is not None else own
        if found is None and self._id.startswith(_SINGLE_TURN):
            found = 1
        if found is None:
            raise ValueError(f"max_turns is not set, and {self._id} has no limit of its own; set it")
        return int(found)


def _suffix(info: Mapping[str, Any]) -> dict[str, str]:
    return {"suffix": info["suffix"]} if isinstance(info.get("suffix"), str) else {}


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
