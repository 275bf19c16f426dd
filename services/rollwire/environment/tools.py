"""A wrapper that gives an environment tools: turns in which the policy runs Python code instead of answering."""

from __future__ import annotations

from typing import Any, Final

from rollwire.environment.options import OptionError, OptionSchema
from rollwire.environment.tool_python import PythonTool
from rollwire.environment.types import UnknownTypeError, resolve

StepReply = tuple[str, float, bool, bool, dict[str, Any]]
_FENCES: Final = (("<python>", "</python>"), ("```python\n", "```"), ("```py\n", "```"))
_INSTRUCTIONS: Final = (
    "You may run Python code before you answer: put it between <python> and </python>, and the next observation shows "
    "what it prints. You can do so {max_tool_uses} times."
)


class Tools:
    """Another environment, with a Python tool beside it."""

    isolation = "process"
    config_only_options = (
        "type",
        "options",
        "max_tool_uses",
        "tool_timeout_s",
        "tool_memory_mib",
        "max_output_characters",
    )

    def __init__(
        self,
        type: str,
        options: dict[str, Any] | None = None,
        max_tool_uses: int = 3,
        tool_timeout_s: float = 10.0,
        tool_memory_mib: int = 512,
        max_output_characters: int = 2000,
        tool_reward: float = 0.0,
        tool_instructions: str = _INSTRUCTIONS,
    ) -> None:
        """Makes the environment; call `reset` before the first turn.

        Args:
            type: Type of the environment, as in a definition.
            options: Its options.
            max_tool_uses: Turns with code, at least 1; further ones go to the environment as answers.
            tool_timeout_s: Longest time of a turn with code; keep it below the definition's `step_timeout_s`.
            tool_memory_mib: Most memory of the code.
            max_output_characters: Longest output; code that prints more is stopped.
            tool_reward: Reward of a turn with code.
            tool_instructions: Text added to the environment's instructions.

        Raises:
            ValueError: The type does not exist, refuses its options, or a setting is out of range.
        """
        if max_tool_uses < 1:
            raise ValueError(f"max_tool_uses is {max_tool_uses}; allowed: 1 or more")
        if type == "tools":
            raise ValueError("type is 'tools'; allowed: a type that is no wrapper")
        try:
            factory = resolve(type)
            schema = OptionSchema(factory, getattr(factory, "config_only_options", ()))
            self._inner: Any = factory(**schema.configured(options or {}))
        except UnknownTypeError as error:
            raise ValueError(f"type is {type!r}{error}") from error
        except OptionError as error:
            raise ValueError(f"options.{error.name} is {error.value!r:.100}; allowed: {error.allowed}") from error
        self._tool = PythonTool(tool_timeout_s, tool_memory_mib, max_output_characters)
        self._max_tool_uses = max_tool_uses
        self._tool_reward = tool_reward
        self._tool_instructions = tool_instructions.replace("{max_tool_uses}", str(max_tool_uses))
        self.max_turns = self._inner.max_turns + max_tool_uses
        self.metrics_agg_mode = {
            **getattr(self._inner, "metrics_agg_mode", {}),
            "tool_use_counter": "sum",
            "tool_success": "mean",
        }
        for name in ("render_text", "render_rgb"):
            if callable(getattr(self._inner, name, None)):
                setattr(self, name, getattr(self._inner, name))

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Starts an episode of the environment."""
        observation, info = self._inner.reset(seed)
        self.max_turns = self._inner.max_turns + self._max_tool_uses  # some environments draw their limit anew
        self._uses = self._answers = 0
        self._suffix = info.get("suffix", "")
        told = [info.get("instructions", ""), self._tool_instructions]
        return observation, {**info, "instructions": "\n".join(part for part in told if part)}

    def step(self, action: str) -> StepReply:
        """Plays one turn: runs the code in it, or else hands it to the environment."""
        code = code_in(action) if self._uses < self._max_tool_uses else None
        if code is not None:
            return self._run(code)
        self._answers += 1
        observation, reward, terminated, truncated, info = self._inner.step(action)
        self._suffix = info.get("suffix", "")
        # Turns with code do not lengthen the game.
        truncated = truncated or (not terminated and self._answers >= self._inner.max_turns)
        metrics = {**info.get("metrics", {}), "tool_use_counter": 0.0}
        modes = {**info.get("metrics_agg_mode", {}), **self.metrics_agg_mode}
        return observation, reward, terminated, truncated, {**info, "metrics": metrics, "metrics_agg_mode": modes}

    def close(self) -> None:
        """Frees what the environment holds."""
        close = getattr(self._inner, "close", None)
        if callable(close):
            close()

    def _run(self, code: str) -> StepReply:
        self._uses += 1
        result = self._tool.run(code)
        left = self._max_tool_uses - self._uses
        observation = f"{result.output or '[no output]'}\n[you can run code {left} more times]"
        metrics = {"tool_use_counter": 1.0, "tool_success": float(result.ok)}
        return observation, self._tool_reward, False, False, {"metrics": metrics, "suffix": self._suffix}


def code_in(response: str) -> str | None:
    """Returns the first code in a response, between `<python>` and `</python>` or fenced as in Markdown; else None."""
    found: tuple[int, str] | None = None
    for opening, closing in _FENCES:
        begin = response.find(opening)
        end = response.find(closing, begin + len(opening)) if begin >= 0 else -1
        if end >= 0 and (found is None or begin < found[0]):
            found = begin, response[begin + len(opening) : end]
    return found[1] if found is not None else None
