"""Pictures of FrozenLake, drawn with NumPy alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollwire.environment.frozen_lake_map import Cell, LakeMap

TILE_PIXELS = 48
Colour = tuple[int, int, int]

_ICE_TOP: Colour = (226, 242, 252)
_ICE_BOTTOM: Colour = (190, 220, 242)
_ICE_EDGE: Colour = (158, 196, 224)
_WATER: Colour = (38, 84, 132)
_DEEP_WATER: Colour = (18, 46, 84)
_GOLD: Colour = (242, 186, 60)
_POLE: Colour = (112, 78, 48)
_COAT: Colour = (206, 62, 58)
_SKIN: Colour = (246, 208, 172)
_HAPPY: Colour = (64, 160, 92)


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
                _fill(tile, _disc(0.5, 0.5, 0.38), _WATER)
                _fill(tile, _disc(0.5, 0.54, 0.31), _DEEP_WATER)
            if (row, column) == lake.goal:
                _draw_flag(tile)
            if (row, column) == player:
                _draw_player(tile, in_hole=bool(lake.holes[row, column]), on_goal=player == lake.goal)
    return picture


def _draw_ice(tile: NDArray[np.uint8]) -> None:
    share = np.linspace(0.0, 1.0, TILE_PIXELS)[:, None, None]
    tile[:] = (1 - share) * np.array(_ICE_TOP) + share * np.array(_ICE_BOTTOM)
    x, y = _coordinates()
    scratches = (np.abs(y + 0.6 * x - 0.55) < 0.012) & (x > 0.15) & (x < 0.4)
    _fill(tile, scratches, (255, 255, 255))
    _fill(tile, (x < 0.02) | (y < 0.02) | (x > 0.98) | (y > 0.98), _ICE_EDGE)


def _draw_flag(tile: NDArray[np.uint8]) -> None:
    x, y = _coordinates()
    _fill(tile, (np.abs(x - 0.3) < 0.035) & (y > 0.14) & (y < 0.88), _POLE)
    _fill(tile, (x > 0.33) & (x < 0.82) & (np.abs(y - 0.31) < 0.17 * (0.82 - x) / 0.49), _GOLD)


def _draw_player(tile: NDArray[np.uint8], in_hole: bool, on_goal: bool) -> None:
    x, y = _coordinates()
    body = (np.abs(x - 0.5) < 0.11 + 0.22 * (y - 0.42)) & (y > 0.42) & (y < 0.82)
    head = _disc(0.5, 0.33, 0.14)
    if in_hole:  # only the head stays above the water
        _fill(tile, _disc(0.5, 0.5, 0.13), _SKIN)
        _fill(tile, _disc(0.5, 0.5, 0.25) & (y > 0.55), _WATER)
        return
    _fill(tile, body, _HAPPY if on_goal else _COAT)
    _fill(tile, head, _SKIN)
    _fill(tile, head & (y < 0.28), _HAPPY if on_goal else _COAT)


def _coordinates() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns x float[1, TILE_PIXELS] and y float[TILE_PIXELS, 1] of pixel centres, in tile widths."""
    centres = (np.arange(TILE_PIXELS) + 0.5) / TILE_PIXELS
    return centres[None, :], centres[:, None]


def _disc(x: float, y: float, radius: float) -> NDArray[np.bool_]:
    columns, rows = _coordinates()
    return (columns - x) ** 2 + (rows - y) ** 2 <= radius**2


def _fill(tile: NDArray[np.uint8], mask: NDArray[np.bool_], colour: Colour) -> None:
    tile[np.broadcast_to(mask, tile.shape[:2])] = colour
