"""ROLL's prompt templates as pure functions from an observation to chat messages.

The texts are kept verbatim, typos included, so that a policy trained with ROLL sees the prompts it knows. A template
is filled with `str.format`; it may leave fields out, but may not name one that does not exist.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

SYSTEM_TEMPLATE = (
    "You're a helpful assistant. You are a good game player. You are aiming to get high reward in the game."
)
# The blanks before the line ends are ROLL's and part of the token sequence.
TURN_TEMPLATE = (
    "Turn {turn_idx}:\n"
    "Observation:\n"
    "{observation}\n"
    "Strictly follow this format:\n"
    "1. output format is '<answer> [your answer] </answer>' with no extra text. \n"
    "2. You have {actions_left} actions left. \n"
    "3. Max response length: {max_response_length} words (tokens).\n"
    "Decide the next action:\n"
)
TURN_FIELDS = frozenset({"turn_idx", "observation", "actions_left", "max_response_length", "suffix"})


@dataclass(frozen=True)
class PromptTemplates:
    """The two texts that turn an environment's replies into a conversation.

    Attributes:
        system: Content of the system message; empty for a conversation without one.
        turn: Content of a user message, with the fields of `TURN_FIELDS` in braces (a literal brace is doubled).

    Raises:
        ValueError: The turn template is malformed or names an unknown field.
    """

    system: str = SYSTEM_TEMPLATE
    turn: str = TURN_TEMPLATE

    def __post_init__(self) -> None:
        try:
            fields = {name for _, name, _, _ in string.Formatter().parse(self.turn) if name is not None}
        except ValueError as error:
            raise ValueError(f"turn template is malformed: {error}") from error
        unknown = sorted(fields - TURN_FIELDS)
        if unknown:
            raise ValueError(f"turn template names unknown field {unknown[0]!r}; allowed: {sorted(TURN_FIELDS)}")

    def first_messages(
        self,
        instructions: str,
        observation: str,
        turn_index: int,
        actions_left: int,
        max_response_tokens: int,
        suffix: str = "",
    ) -> list[dict[str, str]]:
        """Returns the messages that open an episode: system, then the instructions with the first turn.

        Args:
            instructions: What the environment says about its game; empty to send the turn alone.
            observation: First observation.
            turn_index: Turn counted from 0, as on the wire. ROLL prints turns from 1, so this prints 0 as `Turn 1`.
            actions_left: Turns left, this one included.
            max_response_tokens: Longest response the policy may give in a turn, in tokens.
            suffix: What an environment adds to its observation, for templates with `{suffix}`.
        """
        turn = self._turn(observation, turn_index, actions_left, max_response_tokens, suffix)
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = f"{instructions}\n{turn}" if instructions else turn
        return [*system, {"role": "user", "content": content}]

    def next_messages(
        self,
        observation: str,
        turn_index: int,
        actions_left: int,
        max_response_tokens: int,
        suffix: str = "",
    ) -> list[dict[str, str]]:
        """Returns the one user message of a later turn; arguments as for `first_messages`."""
        turn = self._turn(observation, turn_index, actions_left, max_response_tokens, suffix)
        return [{"role": "user", "content": turn}]

    def _turn(
        self,
        observation: str,
        turn_index: int,
        actions_left: int,
        max_response_tokens: int,
        suffix: str,
    ) -> str:
        return self.turn.format(
            turn_idx=turn_index + 1,
            observation=observation,
            actions_left=actions_left,
            max_response_length=max_response_tokens,
            suffix=suffix,
        )
