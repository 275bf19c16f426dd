"""Pictures of Sokoban, drawn with NumPy alone."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from rollwire.environment.sokoban_room import Cell, Room
from rollwire.environment.tiles import (
    COAT,
    HAPPY_COAT,
    TILE_PIXELS,
    Colour,
    Tile,
    box,
    coordinates,
    disc,
    draw_player,
    fill,
    shade,
)

_FLOOR_TOP: Colour = (236, 224, 204)
_FLOOR_BOTTOM: Colour = (224, 208, 182)
_FLOOR_EDGE: Colour = (206, 188, 160)
_BRICK_TOP: Colour = (138, 96, 84)
_BRICK_BOTTOM: Colour = (112, 74, 66)
_MORTAR: Colour = (84, 56, 52)
_TARGET: Colour = (190, 62, 70)
_WOOD: Colour = (198, 142, 74)
_BEAM: Colour = (136, 90, 42)
_PLACED_WOOD: Colour = (122, 176, 98)
_PLACED_BEAM: Colour = (64, 116, 60)


def draw_room(room: Room, player: Cell, boxes: Collection[Cell]) -> NDArray[np.uint8]:
    """Draws a room with its boxes and its player.

    Args:
        room: Room to draw; where its boxes and its player started does not matter.
        player: Row and column of the player.
        boxes: Cells with a box.

    Returns:
        uint8[rows * TILE_PIXELS, columns * TILE_PIXELS, 3].
    """
    picture = np.zeros((room.rows * TILE_PIXELS, room.columns * TILE_PIXELS, 3), np.uint8)
    for row in range(room.rows):
        for column in range(room.columns):
            cell = (row, column)
            top, left = row * TILE_PIXELS, column * TILE_PIXELS
            tile = picture[top : top + TILE_PIXELS, left : left + TILE_PIXELS]
            if cell not in room.floor:
                _draw_wall(tile)
                continue
            on_target = cell in room.targets
            _draw_floor(tile, on_target)
            if cell in boxes:
                _draw_box(tile, on_target)
            if cell == player:
                draw_player(tile, HAPPY_COAT if room.targets <= set(boxes) else COAT)
    return picture


def _draw_wall(tile: Tile) -> None:
    shade(tile, _BRICK_TOP, _BRICK_BOTTOM)
    x, y = coordinates()
    for row in range(3):
        joints = (0.25, 0.75) if row % 2 else (0.0, 0.5, 1.0)
        course = (y > row / 3) & (y < (row + 1) / 3)
        for joint in joints:
            fill(tile, course & (np.abs(x - joint) < 0.02), _MORTAR)
        fill(tile, (np.abs(y - row / 3) < 0.025) & (x >= 0), _MORTAR)


def _draw_floor(tile: Tile, on_target: bool) -> None:
    shade(tile, _FLOOR_TOP, _FLOOR_BOTTOM)
    x, y = coordinates()
    fill(tile, (x < 0.02) | (y < 0.02) | (x > 0.98) | (y > 0.98), _FLOOR_EDGE)
    if on_target:
        fill(tile, disc(0.5, 0.5, 0.3) & ~disc(0.5, 0.5, 0.22), _TARGET)
        fill(tile, disc(0.5, 0.5, 0.11), _TARGET)


def _draw_box(tile: Tile, on_target: bool) -> None:
    wood, beam = (_PLACED_WOOD, _PLACED_BEAM) if on_target else (_WOOD, _BEAM)
    x, y = coordinates()
    inside = box(0.2, 0.2, 0.8, 0.8)
    fill(tile, box(0.12, 0.12, 0.88, 0.88), beam)
    fill(tile, inside, wood)
    fill(tile, inside & ((np.abs(x - y) < 0.06) | (np.abs(x + y - 1) < 0.06)), beam)
