"""Pictures of FrozenLake, drawn with NumPy alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollwire.environment.frozen_lake_map import Cell, LakeMap
from rollwire.environment.tiles import (
    COAT,
    HAPPY_COAT,
    SKIN,
    TILE_PIXELS,
    Colour,
    Tile,
    coordinates,
    disc,
    draw_player,
    fill,
    shade,
)

_ICE_TOP: Colour = (226, 242, 252)
_ICE_BOTTOM: Colour = (190, 220, 242)
_ICE_EDGE: Colour = (158, 196, 224)
_WATER: Colour = (38, 84, 132)
_DEEP_WATER: Colour = (18, 46, 84)
_GOLD: Colour = (242, 186, 60)
_POLE: Colour = (112, 78, 48)


def draw_lake(lake: LakeMap, player: Cell) -> NDArray[np.uint8]:
    """Draws a lake with its player.

    Args:
        lake: Map to draw.
        player: Row and column of the player.

    Returns:
        uint8[size * TILE_PIXELS, size * TILE_PIXELS, 3].
    """
    picture = np.zeros((lake.size * TILE_PIXELS, lake.size * TILE_PIXELS, 3), np.uint8)
    for row in range(lake.size):
        for column in range(lake.size):
            top, left = row * TILE_PIXELS, column * TILE_PIXELS
            tile = picture[top : top + TILE_PIXELS, left : left + TILE_PIXELS]
            _draw_ice(tile)
            if lake.holes[row, column]:
                fill(tile, disc(0.5, 0.5, 0.38), _WATER)
                fill(tile, disc(0.5, 0.54, 0.31), _DEEP_WATER)
            if (row, column) == lake.goal:
                _draw_flag(tile)
            if (row, column) == player:
                _draw_player(tile, in_hole=bool(lake.holes[row, column]), on_goal=player == lake.goal)
    return picture


def _draw_ice(tile: Tile) -> None:
    shade(tile, _ICE_TOP, _ICE_BOTTOM)
    x, y = coordinates()
    scratches = (np.abs(y + 0.6 * x - 0.55) < 0.012) & (x > 0.15) & (x < 0.4)
    fill(tile, scratches, (255, 255, 255))
    fill(tile, (x < 0.02) | (y < 0.02) | (x > 0.98) | (y > 0.98), _ICE_EDGE)


def _draw_flag(tile: Tile) -> None:
    x, y = coordinates()
    fill(tile, (np.abs(x - 0.3) < 0.035) & (y > 0.14) & (y < 0.88), _POLE)
    fill(tile, (x > 0.33) & (x < 0.82) & (np.abs(y - 0.31) < 0.17 * (0.82 - x) / 0.49), _GOLD)


def _draw_player(tile: Tile, in_hole: bool, on_goal: bool) -> None:
    if in_hole:  # only the head stays above the water
        fill(tile, disc(0.5, 0.5, 0.13), SKIN)
        fill(tile, disc(0.5, 0.5, 0.25) & (coordinates()[1] > 0.55), _WATER)
        return
    draw_player(tile, HAPPY_COAT if on_goal else COAT)
