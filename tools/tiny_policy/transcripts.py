"""Games as token ids: exactly the sequence that the rollout server builds, filled in many games at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from rollwire.environment.frozen_lake import ACTIONS, INSTRUCTIONS
from rollwire.rollout.prompts import PromptTemplates
from tools.tiny_policy.player import CELLS, MAX_TURNS, SIZE, Games
from tools.tiny_policy.tokenizer import USUAL_RESPONSE_TOKENS

RESPONSE_TOKENS = 4  # <answer> Right </answer> <|im_end|>


@dataclass(frozen=True)
class Batch:
    """Games of equally many turns, so that no row is padded.

    Attributes:
        tokens: int64[n, length].
        action_slots: int64[turns], position of each turn's action token.
        grid_slots: int64[(turns - 1) * CELLS], positions of the cells of every observation but the first (which nothing
            before it foretells).
        targets: float32[n, turns, 4], probabilities to learn of Left, Down, Right, Up.
    """

    tokens: NDArray[np.int64]
    action_slots: NDArray[np.int64]
    grid_slots: NDArray[np.int64]
    targets: NDArray[np.float32]


class Transcriber:
    """Writes games as token ids. All turns are equally long, so positions are known in advance."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Encodes the fixed text of every turn once."""
        self.action_ids = np.array([_id_of(tokenizer, action) for action in ACTIONS])
        self.answer_ids = np.array([_id_of(tokenizer, text) for text in ("<answer>", "</answer>", "<|im_end|>")])
        self._symbol_ids = np.array([_id_of(tokenizer, symbol) for symbol in "_OGPX√"])
        blocks = [np.array(tokenizer.encode(text).ids) for text in _turn_texts()]
        self._transcript = np.concatenate([self._with_response(block) for block in blocks])
        block_ends = np.cumsum([len(block) + RESPONSE_TOKENS for block in blocks])
        self.ends = block_ends
        self.action_slots = block_ends - RESPONSE_TOKENS + 1
        is_cell = np.isin(self._transcript, self._symbol_ids)
        self.grid_slots = np.flatnonzero(is_cell)
        if len(self.grid_slots) != MAX_TURNS * CELLS:
            raise ValueError("the prompt holds grid symbols outside the observation")

    def batch(self, games: Games, rows: NDArray[np.int64], turns: int) -> Batch:
        """Writes some games, all cut to their first `turns` turns.

        Args:
            games: Games to choose from.
            rows: int[n], which games; each must last at least `turns` turns.
            turns: Turns to write, 1 to MAX_TURNS.
        """
        tokens = np.tile(self._transcript[: self.ends[turns - 1]], (len(rows), 1))
        cells = games.cells[rows, :turns]
        grid = games.lakes.holes[rows].astype(np.int64)
        grid[np.arange(len(rows)), games.lakes.goal[rows]] = 2
        grids = np.repeat(grid[:, None], turns, axis=1)
        np.put_along_axis(grids, cells[:, :, None], 3, axis=2)
        slots = self.grid_slots[: turns * CELLS]
        tokens[:, slots] = self._symbol_ids[grids].reshape(len(rows), -1)
        tokens[:, self.action_slots[:turns]] = self.action_ids[games.actions[rows, :turns]]
        return Batch(tokens, self.action_slots[:turns], slots[CELLS:], games.targets[rows, :turns])

    def _with_response(self, block: NDArray[np.int64]) -> NDArray[np.int64]:
        opening, closing, end = self.answer_ids
        return np.concatenate([block, [opening, self.action_ids[0], closing, end]])


def _turn_texts() -> list[str]:
    """Returns what the policy reads before each of its responses, with an empty lake for the observation."""
    prompts = PromptTemplates()
    lake = "\n".join(["_" * SIZE] * SIZE)
    first = prompts.first_messages(INSTRUCTIONS, lake, 0, MAX_TURNS, USUAL_RESPONSE_TOKENS)
    texts = [_chatml(first)]
    for turn in range(1, MAX_TURNS):
        later = prompts.next_messages(lake, turn, MAX_TURNS - turn, USUAL_RESPONSE_TOKENS)
        texts.append("\n" + _chatml(later))
    return texts


def _chatml(messages: list[dict[str, str]]) -> str:
    body = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return f"{body}<|im_start|>assistant\n"


def _id_of(tokenizer: Tokenizer, text: str) -> int:
    ids: list[int] = tokenizer.encode(text).ids
    if len(ids) != 1:
        raise ValueError(f"{text!r} takes {len(ids)} tokens, not one")
    return ids[0]
