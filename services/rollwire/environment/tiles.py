"""What pictures of games are made of: square tiles and shapes in them, drawn with NumPy alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TILE_PIXELS = 48
Colour = tuple[int, int, int]
Tile = NDArray[np.uint8]
"""uint8[TILE_PIXELS, TILE_PIXELS, 3]."""

SKIN: Colour = (246, 208, 172)
COAT: Colour = (206, 62, 58)
HAPPY_COAT: Colour = (64, 160, 92)


def coordinates() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns x float[1, TILE_PIXELS] and y float[TILE_PIXELS, 1] of pixel centres, in tile widths."""
    centres = (np.arange(TILE_PIXELS) + 0.5) / TILE_PIXELS
    return centres[None, :], centres[:, None]


def disc(x: float, y: float, radius: float) -> NDArray[np.bool_]:
    """Returns the pixels of a disc, bool[TILE_PIXELS, TILE_PIXELS]; all numbers in tile widths."""
    columns, rows = coordinates()
    return (columns - x) ** 2 + (rows - y) ** 2 <= radius**2


def box(left: float, top: float, right: float, bottom: float) -> NDArray[np.bool_]:
    """Returns the pixels of a rectangle, bool[TILE_PIXELS, TILE_PIXELS]; all numbers in tile widths."""
    x, y = coordinates()
    return (x > left) & (x < right) & (y > top) & (y < bottom)


def fill(tile: Tile, mask: NDArray[np.bool_], colour: Colour) -> None:
    """Colours the pixels of a mask."""
    tile[np.broadcast_to(mask, tile.shape[:2])] = colour


def shade(tile: Tile, top: Colour, bottom: Colour) -> None:
    """Fills a tile with a gradient from top to bottom."""
    share = np.linspace(0.0, 1.0, TILE_PIXELS)[:, None, None]
    tile[:] = (1 - share) * np.array(top) + share * np.array(bottom)


def draw_player(tile: Tile, coat: Colour) -> None:
    """Draws a standing player."""
    x, y = coordinates()
    body = (np.abs(x - 0.5) < 0.11 + 0.22 * (y - 0.42)) & (y > 0.42) & (y < 0.82)
    head = disc(0.5, 0.33, 0.14)
    fill(tile, body, coat)
    fill(tile, head, SKIN)
    fill(tile, head & (y < 0.28), coat)
