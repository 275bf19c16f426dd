"""FrozenLake as ROLL plays it: text in, text out, no gymnasium and no torch.

Differences from ROLL, both deliberate: the environment itself reports the turn limit as `truncated` (ROLL leaves that
to its manager), and the metric `format_penalty` is the penalty really given (ROLL reports the constant on valid
actions too).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rollwire.client.png import encode_png
from rollwire.environment.answers import ANSWER_PATTERN, SPECIAL_TOKENS, THINK_PATTERN, AnswerReader
from rollwire.environment.frozen_lake_map import Cell, LakeMap, generate_map, seeded_generator
from rollwire.environment.frozen_lake_tiles import draw_lake

_PLAYER_ON = {"_": "P", "O": "X", "G": "√"}
ACTIONS = ("Left", "Down", "Right", "Up")
_DIRECTIONS = {name.lower(): direction for direction, name in enumerate(ACTIONS)}
# "Forbid the whole" and the warning of slippery ice on firm ice are ROLL's; policies are compared on this very text.
INSTRUCTIONS = (
    "You are solving the FrozenLake puzzle. Forbid the whole and go to the target. You may move to the unintended "
    "direction due to the slippery ice. The answer must be one of action in a turn, format is <answer>Right</answer>\n"
    "The meaning of each symbol in the state is:\n"
    "P: player, _: empty, O: hole, G: goal, X: player in hole, √: player on goal\n"
    "Your available actions are:\n"
    "Left, Down, Right, Up"
)
METRICS_AGG_MODE = {
    "action_is_effective": "mean",
    "action_is_valid": "mean",
    "success": "last",
    "format_penalty": "mean",
}
_MOVES: tuple[Cell, ...] = ((0, -1), (1, 0), (0, 1), (-1, 0))
# Gymnasium's order of outcomes on slippery ice: one perpendicular, the intended, the other perpendicular.
_SLIPS = (-1, 0, 1)
_SLIP_BOUNDS = np.cumsum([1 / 3] * 3)

StepReply = tuple[str, float, bool, bool, dict[str, Any]]


class FrozenLake:
    """A lake crossed in turns; the map and the slips follow from the seed given to `reset`."""

    metrics_agg_mode: ClassVar = METRICS_AGG_MODE
    # A malicious regular expression, or thousands of tokens, would block the server for all; pictures are for threads.
    config_only_options: ClassVar = ("action_pattern", "special_token_list", "observation_images")
    sessions_per_process: ClassVar = 16  # where it runs in one: games draw from generators of their own

    def __init__(
        self,
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = False,
        max_steps: int = 10,
        format_penalty: float = -0.01,
        action_pattern: str = ANSWER_PATTERN,
        special_token_list: Sequence[str] = SPECIAL_TOKENS,
        env_instruction: str = INSTRUCTIONS,
        observation_images: bool = False,
    ) -> None:
        """Checks the settings; call `reset` before the first turn.

        Args:
            size: Cells along one side, 2 to 64.
            p: Probability that a cell is frozen, in (0, 1].
            is_slippery: Whether a move goes each with 1/3 as intended or to one of the two sides.
            max_steps: Turns after which the episode is truncated, at least 1.
            format_penalty: Reward of a turn without a legal action.
            action_pattern: Regular expression (dot matches newline) whose last group is the action.
            special_token_list: Texts removed from a response before it is parsed.
            env_instruction: Instructions shown with the first observation.
            observation_images: Whether each observation comes with a picture too.

        Raises:
            ValueError: A setting is out of range or the pattern is no regular expression with a group.
        """
        if not 2 <= size <= 64:
            raise ValueError(f"size is {size}; allowed: 2 to 64")
        if not 0.0 < p <= 1.0:
            raise ValueError(f"p is {p}; allowed: above 0, at most 1")
        if max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}; allowed: 1 or more")
        self.size, self.p, self.is_slippery = size, p, is_slippery
        self.max_turns = max_steps
        self.format_penalty = format_penalty
        self.observation_images = observation_images
        self._answers = AnswerReader(action_pattern, special_token_list)
        self._instructions = env_instruction
        self._lake: LakeMap | None = None

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Starts an episode.

        Args:
            seed: Non-negative; decides the map and, on slippery ice, the slips.

        Returns:
            The first observation, and info with `instructions` and perhaps `observation_png`.
        """
        self._lake = generate_map(self.size, self.p, seed)
        # The lake without its player as one text: only one symbol changes in a turn.
        self._ice = _symbols(self._lake)
        self._player = self._lake.start
        self._turn = 0
        self._done = False
        self._slips = seeded_generator(seed)
        # Gymnasium spends one draw on the start cell; without it slippery episodes would part from ROLL's.
        self._slips.random()
        return self.render_text(), self._with_picture({"instructions": self._instructions})

    def step(self, action: str) -> StepReply:
        """Plays one turn.

        Args:
            action: The policy's whole response.

        Returns:
            Observation; reward (1 at the goal, `format_penalty` without a legal action, else 0); terminated (in a hole
            or on the goal); truncated (turn limit reached and not terminated); info with `metrics` and
            `metrics_agg_mode`.

        Raises:
            RuntimeError: There is no episode, or it has ended.
        """
        if self._lake is None or self._done:
            state = "no episode has started" if self._lake is None else "the episode has ended"
            raise RuntimeError(f"{state}; call reset")
        self._turn += 1
        direction = self.parse_action(action)
        before = self._player
        if direction is not None:
            self._player = self._destination(before, direction)
        place = self._place()
        symbol = self._ice[place]
        success = symbol == "G"
        terminated = success or symbol == "O"
        truncated = not terminated and self._turn >= self.max_turns
        self._done = terminated or truncated
        penalty = self.format_penalty if direction is None else 0.0
        metrics = {
            "action_is_effective": float(self._player != before),
            "action_is_valid": float(direction is not None),
            "success": float(success),
            "format_penalty": penalty,
        }
        info = self._with_picture({"metrics": metrics, "metrics_agg_mode": METRICS_AGG_MODE})
        return self._drawn(place), float(success) + penalty, terminated, truncated, info

    def parse_action(self, response: str) -> int | None:
        """Returns the direction a response names (0 Left, 1 Down, 2 Right, 3 Up), or None when it names none."""
        return _DIRECTIONS.get((self._answers.read(response) or "").lower())

    def render_text(self) -> str:
        """Returns the lake as the policy sees it: rows from the top, joined by newlines, one symbol per cell."""
        self._current_lake()
        return self._drawn(self._place())

    def _drawn(self, place: int) -> str:
        """Returns the lake with its player at `place`."""
        return self._ice[:place] + _PLAYER_ON[self._ice[place]] + self._ice[place + 1 :]

    def _place(self) -> int:
        """Returns where the player's cell is in the text."""
        row, column = self._player
        return row * (self.size + 1) + column

    def render_rgb(self) -> NDArray[np.uint8]:
        """Returns the lake as a picture, uint8[height, width, 3]."""
        return draw_lake(self._current_lake(), self._player)

    def _with_picture(self, info: dict[str, Any]) -> dict[str, Any]:
        if self.observation_images:
            info["observation_png"] = encode_png(self.render_rgb())
        return info

    def _current_lake(self) -> LakeMap:
        if self._lake is None:
            raise RuntimeError("no episode has started; call reset")
        return self._lake

    def _destination(self, cell: Cell, direction: int) -> Cell:
        if self.is_slippery:
            draw = self._slips.random()
            outcome = int(np.argmax(draw < _SLIP_BOUNDS))
            direction = (direction + _SLIPS[outcome]) % 4
        down, right = _MOVES[direction]
        row, column = cell[0] + down, cell[1] + right
        inside = 0 <= row < self.size and 0 <= column < self.size
        return (row, column) if inside else cell


class FrozenLakeThink(FrozenLake):
    """FrozenLake whose responses must think before they answer."""

    def __init__(self, action_pattern: str = THINK_PATTERN, **settings: Any) -> None:
        """Takes the settings of `FrozenLake`; only the default pattern differs."""
        super().__init__(action_pattern=action_pattern, **settings)


def _symbols(lake: LakeMap) -> str:
    grid = np.where(lake.holes, "O", "_")
    grid[lake.goal] = "G"
    return "\n".join("".join(row) for row in grid)
