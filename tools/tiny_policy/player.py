"""The clumsy player that the tiny policy imitates, played on many lakes at once.

At every turn, with probability `skill` it moves along a shortest path (uniform among the shortest), else it makes one
of the four legal moves at random. Lakes have the distribution of `rollwire.environment.frozen_lake_map` (4x4, p 0.8)
but come from a stream of their own: no validation or training seed of a run is ever used here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SIZE = 4
CELLS = SIZE * SIZE
FROZEN_PROBABILITY = 0.8
MAX_TURNS = 10
FAR = 99  # distance of a cell from which the goal cannot be reached
_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))


def _destinations() -> NDArray[np.int64]:
    """Returns int[CELLS, 4]: the cell that each move leads to; a bump into the wall stays."""
    table = np.empty((CELLS, 4), np.int64)
    for cell in range(CELLS):
        row, column = divmod(cell, SIZE)
        for action, (down, right) in enumerate(_MOVES):
            r, c = min(max(row + down, 0), SIZE - 1), min(max(column + right, 0), SIZE - 1)
            table[cell, action] = r * SIZE + c
    return table


DESTINATION = _destinations()


@dataclass(frozen=True)
class Lakes:
    """Many solvable lakes.

    Attributes:
        holes: bool[n, CELLS].
        start: int[n], a cell.
        goal: int[n], a cell.
        distance: int[n, CELLS], moves to the goal; `FAR` from holes and cells cut off.
    """

    holes: NDArray[np.bool_]
    start: NDArray[np.int64]
    goal: NDArray[np.int64]
    distance: NDArray[np.int64]


@dataclass(frozen=True)
class Games:
    """Finished games; entries after a game's end are meaningless.

    Attributes:
        lakes: The n lakes played.
        cells: int[n, MAX_TURNS + 1], the player's cell before each turn and after the last.
        actions: int[n, MAX_TURNS].
        targets: float32[n, MAX_TURNS, 4], probability that the network shall give each action.
        turns: int[n], turns played.
        success: bool[n].
    """

    lakes: Lakes
    cells: NDArray[np.int64]
    actions: NDArray[np.int64]
    targets: NDArray[np.float32]
    turns: NDArray[np.int64]
    success: NDArray[np.bool_]


def draw_lakes(generator: np.random.Generator, count: int) -> Lakes:
    """Draws at most `count` lakes: unsolvable ones (about a tenth) are dropped, not redrawn."""
    holes = generator.random((count, CELLS)) >= FROZEN_PROBABILITY
    start = generator.integers(0, CELLS, count)
    goal = (start + generator.integers(1, CELLS, count)) % CELLS
    index = np.arange(count)
    holes[index, start] = holes[index, goal] = False
    distance = goal_distances(holes, goal)
    keep = distance[index, start] < FAR
    return Lakes(holes[keep], start[keep], goal[keep], distance[keep])


def goal_distances(holes: NDArray[np.bool_], goal: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns int[n, CELLS]: length of the shortest path to the goal around the holes."""
    distance = np.full(holes.shape, FAR)
    distance[np.arange(len(goal)), goal] = 0
    while True:
        shorter = np.minimum(distance, distance[:, DESTINATION].min(axis=2) + 1)
        shorter[holes] = FAR
        shorter = np.minimum(shorter, FAR)
        if np.array_equal(shorter, distance):
            return distance
        distance = shorter


def shortest_path_policy(lakes: Lakes, cells: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns float32[n, 4]: uniform over the moves that shorten the way from `cells` (int[n]) to the goal."""
    index = np.arange(len(cells))
    ahead = lakes.distance[index[:, None], DESTINATION[cells]]
    best = ahead == ahead.min(axis=1, keepdims=True)
    policy: NDArray[np.float32] = (best / best.sum(axis=1, keepdims=True)).astype(np.float32)
    return policy


def play(generator: np.random.Generator, lakes: Lakes, skill: float, target_skill: float) -> Games:
    """Plays every lake to its end.

    Args:
        generator: Source of the moves.
        lakes: Lakes to play.
        skill: Skill of the player.
        target_skill: Skill of the player whose probabilities, on the same cells, become the targets.
    """
    count = len(lakes.start)
    index = np.arange(count)
    cells = np.zeros((count, MAX_TURNS + 1), np.int64)
    actions = np.zeros((count, MAX_TURNS), np.int64)
    targets = np.zeros((count, MAX_TURNS, 4), np.float32)
    turns = np.zeros(count, np.int64)
    cells[:, 0] = here = lakes.start
    playing = np.ones(count, bool)
    for turn in range(MAX_TURNS):
        best = shortest_path_policy(lakes, here)
        targets[:, turn] = target_skill * best + (1 - target_skill) / 4
        bounds = (skill * best + (1 - skill) / 4).cumsum(axis=1)
        actions[:, turn] = np.minimum((generator.random((count, 1)) > bounds).sum(axis=1), 3)
        here = np.where(playing, DESTINATION[here, actions[:, turn]], here)
        cells[:, turn + 1] = here
        turns += playing
        playing &= (here != lakes.goal) & ~lakes.holes[index, here]
    return Games(lakes, cells, actions, targets, turns, here == lakes.goal)
