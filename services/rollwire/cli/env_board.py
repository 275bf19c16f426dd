"""How an observation looks in the terminal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

_GLYPHS = {"_": " ", "O": "≈", "G": "⚑", "P": "☻", "X": "☻", "√": "☻"}
_COLOURS = {"O": "#6fa8d8", "G": "#b3541e", "P": "#b3261e", "X": "#e07a70", "√": "#1f7a3d"}
_WATER = "#173a63"
_GOAL = "#ffe08a"
_ICE = ("#bcdff5", "#d7effc")
_LARGE_LAKE = 12


def is_lake(observation: str) -> bool:
    """Tells whether an observation is a grid of FrozenLake's symbols."""
    rows = observation.splitlines()
    return bool(rows) and all(rows) and set("".join(rows)) <= _GLYPHS.keys() and len({len(row) for row in rows}) == 1


def board(observation: str, *, tiles: bool) -> RenderableType:
    """Draws an observation.

    Args:
        observation: What the policy would see.
        tiles: Draw a lake as coloured tiles; anything else, and a lake without colours, is shown as the text it is.
    """
    if not tiles or not is_lake(observation):
        return Padding(Text(observation), (0, 2))
    rows = observation.splitlines()
    # A character is about twice as high as wide.
    width, height = (2, 1) if len(rows) > _LARGE_LAKE else (6, 3)
    lines = []
    for row, symbols in enumerate(rows):
        for line in range(height):
            picture = Text()
            for column, symbol in enumerate(symbols):
                glyph = _GLYPHS[symbol] if line == height // 2 else " "
                picture.append(glyph.center(width), _style(symbol, row, column))
            lines.append(picture)
    return Padding(Text("\n").join(lines), (0, 2))


def _style(symbol: str, row: int, column: int) -> str:
    ice = _ICE[(row + column) % 2]
    background = {"O": _WATER, "X": _WATER, "G": _GOAL, "√": _GOAL}.get(symbol, ice)
    return f"bold {_COLOURS.get(symbol, ice)} on {background}"
