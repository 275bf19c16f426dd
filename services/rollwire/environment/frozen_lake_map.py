"""Maps of FrozenLake: ROLL's generator, equal map for equal seed.

The draws are NumPy's and their order is the contract: all cells, then start row, start column, goal row, goal column
(again while both are the same cell), then everything anew from the same stream until the goal can be reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Cell = tuple[int, int]


def seeded_generator(seed: int) -> np.random.Generator:
    """Returns the generator that `gymnasium.utils.seeding.np_random(seed)` gives, without gymnasium."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))


@dataclass(frozen=True)
class LakeMap:
    """One lake.

    Attributes:
        holes: bool[size, size], True where the ice is broken; never at start or goal.
        start: Row and column of the player's first cell.
        goal: Row and column of the goal.
    """

    holes: NDArray[np.bool_]
    start: Cell
    goal: Cell

    @property
    def size(self) -> int:
        """Cells along one side."""
        return int(self.holes.shape[0])

    def rows(self) -> list[str]:
        """Returns the map as gymnasium writes it: S start, G goal, F frozen, H hole; rows from the top."""
        grid = np.where(self.holes, "H", "F")
        grid[self.start] = "S"
        grid[self.goal] = "G"
        return ["".join(row) for row in grid]


def generate_map(size: int, p: float, seed: int) -> LakeMap:
    """Draws a map on which the goal can be reached.

    Args:
        size: Cells along one side, at least 2.
        p: Probability that a cell is frozen, above 0; the rest are holes.
        seed: Non-negative seed.

    Returns:
        The map that ROLL's `generate_random_map(size, p, seed)` builds.
    """
    generator = seeded_generator(seed)
    p = min(1.0, p)
    while True:
        holes = generator.choice(["F", "H"], (size, size), p=[p, 1 - p]) == "H"
        start = goal = (0, 0)
        while start == goal:
            drawn = [int(generator.integers(0, size)) for _ in range(4)]
            start, goal = (drawn[0], drawn[1]), (drawn[2], drawn[3])
        holes[start] = holes[goal] = False
        lake = LakeMap(holes, start, goal)
        if reachable(lake):
            return lake


def reachable(lake: LakeMap) -> bool:
    """Says whether a path of frozen cells leads from the start to the goal."""
    frontier, seen = [lake.start], {lake.start}
    while frontier:
        cell = frontier.pop()
        if cell == lake.goal:
            return True
        fresh = [n for n in _neighbours(cell, lake.size) if not lake.holes[n] and n not in seen]
        seen.update(fresh)
        frontier.extend(fresh)
    return False


def _neighbours(cell: Cell, size: int) -> Iterator[Cell]:
    row, column = cell
    for r, c in ((row, column - 1), (row + 1, column), (row, column + 1), (row - 1, column)):
        if 0 <= r < size and 0 <= c < size:
            yield r, c
