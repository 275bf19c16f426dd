"""Rooms of Sokoban, drawn from a seed. Each is made by playing backwards from its solution, so each can be solved."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Cell = tuple[int, int]

MOVES: tuple[Cell, ...] = ((-1, 0), (1, 0), (0, -1), (0, 1))
"""Up, down, left, right, as rows and columns."""

_DIGS = 16  # rooms that are dug until one is hard enough; then the hardest is taken
_HARD_MOVES = 4  # moves of the shortest solution from which a room is hard enough
_MOST_STATES = 2500  # states that are looked at per room
_STRAIGHT = 0.6  # chance to dig on in the same direction
_FLOOR_SHARE = 0.55  # part of the cells inside the outer wall that becomes floor


@dataclass(frozen=True)
class Room:
    """A room at the start of a game.

    Attributes:
        rows: Cells from top to bottom, the outer wall included.
        columns: Cells from left to right, the outer wall included.
        floor: Cells that are no wall.
        targets: Cells where boxes belong.
        boxes: Cells with a box; as many as targets, and not all of them on one.
        player: The player's cell.
        moves: Moves of a shortest solution.
    """

    rows: int
    columns: int
    floor: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell
    moves: int


@lru_cache(256)  # the episodes of a group start from the same room
def generate_room(rows: int, columns: int, boxes: int, search_depth: int, seed: int) -> Room:
    """Draws a room.

    Args:
        rows: Cells from top to bottom, at least 5, the outer wall included.
        columns: Cells from left to right, at least 5, the outer wall included.
        boxes: Boxes, at least 1, at most `most_boxes(rows, columns)`.
        search_depth: Most moves of a shortest solution, at least 1.
        seed: Non-negative; the same arguments give the same room.

    Returns:
        A room that can be solved in at most `search_depth` moves and is not solved yet.
    """
    random = _Draws(seed)
    digs, best = 0, None
    while best is None or (digs < _DIGS and (best.boxes & best.targets or best.moves < min(_HARD_MOVES, search_depth))):
        digs += 1
        floor = _dig(rows, columns, boxes, random)
        cells = sorted(floor)
        random.shuffle(cells)
        targets = frozenset(cells[:boxes])
        player, placed, moves = _hardest_start(floor, targets, search_depth, random)
        if moves and (best is None or moves > best.moves):
            best = Room(rows, columns, floor, targets, placed, player, moves)
    return best


def most_boxes(rows: int, columns: int) -> int:
    """Returns the most boxes for which there is room: one for five cells inside the outer wall."""
    return (rows - 2) * (columns - 2) // 5


def _dig(rows: int, columns: int, boxes: int, random: _Draws) -> frozenset[Cell]:
    """Digs floor out of rock by a walk that widens its way; all of it hangs together."""
    inside = (rows - 2) * (columns - 2)
    wanted = max(int(inside * _FLOOR_SHARE), 2 * boxes + 2)
    row, column = 1 + random.below(rows - 2), 1 + random.below(columns - 2)
    floor = {(row, column)}
    direction = random.below(4)
    while len(floor) < wanted:
        if not random.chance(_STRAIGHT):
            direction = random.below(4)
        down, right = MOVES[direction]
        if not (1 <= row + down < rows - 1 and 1 <= column + right < columns - 1):
            direction = random.below(4)
            continue
        row, column = row + down, column + right
        floor.add((row, column))
        # A second cell beside the way: boxes cannot be turned in corridors.
        side = (row + right, column + down)
        if 1 <= side[0] < rows - 1 and 1 <= side[1] < columns - 1 and random.chance(0.5):
            floor.add(side)
    return frozenset(floor)


def _hardest_start(
    floor: frozenset[Cell], targets: frozenset[Cell], depth: int, random: _Draws
) -> tuple[Cell, frozenset[Cell], int]:
    """Plays backwards, breadth first, from the solved room: a state's depth is the length of its shortest solution.

    Returns:
        Player, boxes and depth of the hardest state; a solved one with depth 0 when no box can be pulled.
    """
    seen = {(player, targets) for player in floor - targets}
    frontier = deque((player, targets, 0) for player, _ in sorted(seen, key=lambda state: state[0]))
    best: list[tuple[Cell, frozenset[Cell], int]] = []
    hardest = (-1, -1)
    while frontier:
        player, boxes, moves = frontier.popleft()
        hardness = (len(boxes - targets), moves)
        if hardness > hardest:
            hardest, best = hardness, []
        if hardness == hardest:
            best.append((player, boxes, moves))
        if moves < depth and len(seen) < _MOST_STATES:
            for state in _before(floor, player, boxes):
                if state not in seen:
                    seen.add(state)
                    frontier.append((*state, moves + 1))
    return best[random.below(len(best))]


def _before(floor: frozenset[Cell], player: Cell, boxes: frozenset[Cell]) -> Iterator[tuple[Cell, frozenset[Cell]]]:
    """Yields the states from which one move leads to this one."""
    row, column = player
    for down, right in MOVES:
        there = (row + down, column + right)
        if there in floor and there not in boxes:
            yield there, boxes
            behind = (row - down, column - right)
            if behind in boxes:
                yield there, boxes - {behind} | {player}


class _Draws:
    """Random numbers of a seed; NumPy's stream is drawn in blocks, because single draws cost more than a move."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
        self._block: list[float] = []

    def _next(self) -> float:
        if not self._block:
            self._block = self._generator.random(512).tolist()
        return self._block.pop()

    def below(self, bound: int) -> int:
        return int(self._next() * bound)

    def chance(self, probability: float) -> bool:
        return self._next() < probability

    def shuffle(self, items: list[Cell]) -> None:
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]
