"""Sokoban as ROLL plays it: text in, text out, gym-sokoban's rewards, rooms of our own.

Differences from ROLL, all deliberate: rooms come from another generator and can always be solved within the turn
limit; the environment itself reports the turn limit as `truncated`; the option `symbols` takes the place of ROLL's two
tables of symbols.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rollwire.client.png import encode_png
from rollwire.environment.answers import ANSWER_PATTERN, SPECIAL_TOKENS, AnswerReader
from rollwire.environment.sokoban_room import MOVES, Cell, Room, generate_room, most_boxes
from rollwire.environment.sokoban_tiles import draw_room

ACTIONS = ("Up", "Down", "Left", "Right")
_DIRECTIONS = {name.lower(): direction for direction, name in enumerate(ACTIONS)}
SYMBOLS = "#_O√XPS"
"""Wall, empty, target, box on target, box, player, player on target."""

_MEANINGS = ("wall", "empty", "target", "box on target", "box", "player", "player on target")
# ROLL's text; policies are compared on it.
INSTRUCTIONS = (
    "You are solving the Sokoban puzzle. You are the player and you need to push all boxes to targets. When you are "
    "right next to a box, you can push it by moving in the same direction. You cannot push a box through a wall, and "
    "you cannot pull a box. The answer must be one of action in a turn, format is <answer>Right</answer>"
)
METRICS_AGG_MODE = {
    "action_is_effective": "mean",
    "action_is_valid": "mean",
    "success": "last",
    "format_penalty": "mean",
}
STEP_REWARD = -0.1
BOX_REWARD = 1.0
DONE_REWARD = 10.0
SMALLEST_SIDE, LARGEST_SIDE = 5, 24

StepReply = tuple[str, float, bool, bool, dict[str, Any]]


class Sokoban:
    """Boxes to be pushed to targets; the room follows from the seed given to `reset`."""

    metrics_agg_mode: ClassVar = METRICS_AGG_MODE
    config_only_options: ClassVar = ("action_pattern", "special_token_list", "observation_images")
    sessions_per_process: ClassVar = 16  # where it runs in one: games draw from generators of their own

    def __init__(
        self,
        dim_room: Annotated[Sequence[int], Field(min_length=2, max_length=2)] = (6, 6),
        num_boxes: int = 3,
        max_steps: int = 100,
        search_depth: int = 300,
        format_penalty: float = 0.0,
        action_pattern: str = ANSWER_PATTERN,
        special_token_list: Sequence[str] = SPECIAL_TOKENS,
        symbols: str = SYMBOLS,
        env_instruction: str | None = None,
        observation_images: bool = False,
    ) -> None:
        """Checks the settings; call `reset` before the first turn.

        Args:
            dim_room: Rows and columns, the outer wall included, each 5 to 24.
            num_boxes: Boxes, at least 1; at most one for five cells inside the outer wall.
            max_steps: Turns after which the episode is truncated, at least 1.
            search_depth: Most moves of the shortest solution, at least 1; `max_steps` is a bound, too.
            format_penalty: Reward of a turn without a legal action.
            action_pattern: Regular expression (dot matches newline) whose last group is the action.
            special_token_list: Texts removed from a response before it is parsed.
            symbols: Seven different characters for wall, empty, target, box on target, box, player, player on target.
            env_instruction: Instructions shown with the first observation; not set: ROLL's, with these symbols.
            observation_images: Whether each observation comes with a picture too.

        Raises:
            ValueError: A setting is out of range or the pattern is no regular expression with a group.
        """
        rows, columns = dim_room
        if not (SMALLEST_SIDE <= rows <= LARGEST_SIDE and SMALLEST_SIDE <= columns <= LARGEST_SIDE):
            raise ValueError(
                f"dim_room is {list(dim_room)}; allowed: rows and columns from {SMALLEST_SIDE} to {LARGEST_SIDE}"
            )
        if not 1 <= num_boxes <= most_boxes(rows, columns):
            raise ValueError(
                f"num_boxes is {num_boxes}; allowed: 1 to {most_boxes(rows, columns)} in a room of {rows} x {columns}"
            )
        if max_steps < 1 or search_depth < 1:
            raise ValueError(f"max_steps is {max_steps} and search_depth {search_depth}; allowed: 1 or more")
        if len(set(symbols)) != len(SYMBOLS) or len(symbols) != len(SYMBOLS) or "\n" in symbols:
            raise ValueError(f"symbols is {symbols!r}; allowed: seven different characters for {', '.join(_MEANINGS)}")
        self.max_turns = max_steps
        self.observation_images = observation_images
        self.format_penalty = format_penalty
        self._room_settings = (rows, columns, num_boxes, min(search_depth, max_steps))
        self._symbols = symbols
        self._answers = AnswerReader(action_pattern, special_token_list)
        meanings = ", ".join(f"{symbol}: {meaning}" for symbol, meaning in zip(symbols, _MEANINGS, strict=True))
        self._instructions = (
            env_instruction
            if env_instruction is not None
            else (
                f"{INSTRUCTIONS}\nThe meaning of each symbol in the state is:\n{meanings}\n"
                f"Your available actions are:\n{', '.join(ACTIONS)}"
            )
        )
        self._room: Room | None = None

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Starts an episode.

        Args:
            seed: Non-negative; decides the room.

        Returns:
            The first observation, and info with `instructions` and perhaps `observation_png`.
        """
        self._room = generate_room(*self._room_settings, seed)
        self._player, self._boxes = self._room.player, set(self._room.boxes)
        self._turn = 0
        self._done = False
        return self.render_text(), self._with_picture({"instructions": self._instructions})

    def step(self, action: str) -> StepReply:
        """Plays one turn.

        Args:
            action: The policy's whole response.

        Returns:
            Observation; reward (-0.1 for a move, 1 more for each box pushed onto a target, 1 less for each pushed off
            one, 10 more when all are on targets; `format_penalty` alone without a legal action); terminated (all boxes
            on targets); truncated (turn limit reached and not terminated); info with `metrics`, `metrics_agg_mode` and
            perhaps `observation_png`.

        Raises:
            RuntimeError: There is no episode, or it has ended.
        """
        if self._room is None or self._done:
            state = "no episode has started" if self._room is None else "the episode has ended"
            raise RuntimeError(f"{state}; call reset")
        self._turn += 1
        direction = _DIRECTIONS.get((self._answers.read(action) or "").lower())
        before, placed = self._player, len(self._boxes & self._room.targets)
        if direction is not None:
            self._move(self._room, *MOVES[direction])
        gained = len(self._boxes & self._room.targets) - placed
        success = self._boxes == self._room.targets
        reward = self.format_penalty
        if direction is not None:
            reward = STEP_REWARD + BOX_REWARD * gained + DONE_REWARD * success
        truncated = not success and self._turn >= self.max_turns
        self._done = success or truncated
        metrics = {
            "action_is_effective": float(self._player != before),
            "action_is_valid": float(direction is not None),
            "success": float(success),
            "format_penalty": self.format_penalty if direction is None else 0.0,
        }
        info = self._with_picture({"metrics": metrics, "metrics_agg_mode": METRICS_AGG_MODE})
        return self.render_text(), reward, success, truncated, info

    def render_text(self) -> str:
        """Returns the room as the policy sees it: rows from the top, joined by newlines, one symbol per cell."""
        room = self._current_room()
        return "\n".join(
            "".join(self._symbol(room, (row, column)) for column in range(room.columns)) for row in range(room.rows)
        )

    def render_rgb(self) -> NDArray[np.uint8]:
        """Returns the room as a picture, uint8[height, width, 3]."""
        return draw_room(self._current_room(), self._player, self._boxes)

    def _move(self, room: Room, down: int, right: int) -> None:
        """Moves the player, and a box before it, where nothing is in the way."""
        there = (self._player[0] + down, self._player[1] + right)
        if there in self._boxes:
            beyond = (there[0] + down, there[1] + right)
            if beyond not in room.floor or beyond in self._boxes:
                return
            self._boxes.remove(there)
            self._boxes.add(beyond)
        if there in room.floor:
            self._player = there

    def _symbol(self, room: Room, cell: Cell) -> str:
        wall, empty, target, box_on_target, box, player, player_on_target = tuple(self._symbols)
        if cell not in room.floor:
            return wall
        on_target = cell in room.targets
        if cell == self._player:
            return player_on_target if on_target else player
        if cell in self._boxes:
            return box_on_target if on_target else box
        return target if on_target else empty

    def _with_picture(self, info: dict[str, Any]) -> dict[str, Any]:
        if self.observation_images:
            info["observation_png"] = encode_png(self.render_rgb())
        return info

    def _current_room(self) -> Room:
        if self._room is None:
            raise RuntimeError("no episode has started; call reset")
        return self._room


class SimpleSokoban(Sokoban):
    """Sokoban in a room of 6 x 6 with one box."""

    def __init__(
        self,
        dim_room: Annotated[Sequence[int], Field(min_length=2, max_length=2)] = (6, 6),
        num_boxes: int = 1,
        max_steps: int = 10,
        format_penalty: float = -0.15,
        **settings: Any,
    ) -> None:
        """Takes the settings of `Sokoban`; only defaults differ."""
        super().__init__(dim_room, num_boxes, max_steps, format_penalty=format_penalty, **settings)


class LargerSokoban(Sokoban):
    """Sokoban in a room of 10 x 10 with two boxes."""

    def __init__(
        self,
        dim_room: Annotated[Sequence[int], Field(min_length=2, max_length=2)] = (10, 10),
        num_boxes: int = 2,
        max_steps: int = 10,
        search_depth: int = 10,
        format_penalty: float = -0.15,
        **settings: Any,
    ) -> None:
        """Takes the settings of `Sokoban`; only defaults differ."""
        super().__init__(dim_room, num_boxes, max_steps, search_depth, format_penalty, **settings)


class SokobanDifferentGridVocab(Sokoban):
    """Sokoban in a room of 6 x 6 with one box, drawn with letters."""

    def __init__(
        self,
        dim_room: Annotated[Sequence[int], Field(min_length=2, max_length=2)] = (6, 6),
        num_boxes: int = 1,
        max_steps: int = 10,
        search_depth: int = 30,
        format_penalty: float = -0.15,
        symbols: str = "W.GCBA@",
        **settings: Any,
    ) -> None:
        """Takes the settings of `Sokoban`; only defaults differ."""
        super().__init__(dim_room, num_boxes, max_steps, search_depth, format_penalty, symbols=symbols, **settings)
