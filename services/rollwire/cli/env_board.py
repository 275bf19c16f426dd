"""How an observation looks in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

_LARGE_BOARD = 12


@dataclass(frozen=True)
class _Look:
    """How the cells of a game look.

    Attributes:
        glyphs: What is drawn for a symbol of the observation.
        colours: Of glyphs.
        ground: Two colours that take turns.
        grounds: Colours of cells whose ground is another.
    """

    glyphs: Mapping[str, str]
    colours: Mapping[str, str]
    ground: tuple[str, str]
    grounds: Mapping[str, str] = field(default_factory=dict)


_WATER, _GOAL, _WALL, _TARGET = "#173a63", "#ffe08a", "#70504a", "#f2b8b0"
_LAKE = _Look(
    {"_": " ", "O": "≈", "G": "⚑", "P": "☻", "X": "☻", "√": "☻"},
    {"O": "#6fa8d8", "G": "#b3541e", "P": "#b3261e", "X": "#e07a70", "√": "#1f7a3d"},
    ("#bcdff5", "#d7effc"),
    {"O": _WATER, "X": _WATER, "G": _GOAL, "√": _GOAL},
)
_STORE = _Look(
    {"#": " ", "_": " ", "O": "◎", "√": "▣", "X": "▣", "P": "☻", "S": "☻"},
    {"O": "#b3261e", "√": "#1f7a3d", "X": "#8a5a1e", "P": "#b3261e", "S": "#b3261e"},
    ("#ece0cc", "#e4d6bc"),
    {"#": _WALL, "O": _TARGET, "√": _TARGET, "S": _TARGET},
)


def is_board(observation: str) -> bool:
    """Tells whether an observation is a grid of the symbols of FrozenLake or Sokoban."""
    return _look(observation) is not None


def board(observation: str, *, tiles: bool) -> RenderableType:
    """Draws an observation.

    Args:
        observation: What the policy would see.
        tiles: Draw a board as coloured tiles; anything else, and a board without colours, is shown as the text it is.
    """
    look = _look(observation) if tiles else None
    if look is None:
        return Padding(Text(observation), (0, 2))
    rows = observation.splitlines()
    # A character is about twice as high as wide.
    width, height = (2, 1) if len(rows) > _LARGE_BOARD else (6, 3)
    lines = []
    for row, symbols in enumerate(rows):
        for line in range(height):
            picture = Text()
            for column, symbol in enumerate(symbols):
                glyph = look.glyphs[symbol] if line == height // 2 else " "
                picture.append(glyph.center(width), _style(look, symbol, row, column))
            lines.append(picture)
    return Padding(Text("\n").join(lines), (0, 2))


def _look(observation: str) -> _Look | None:
    rows = observation.splitlines()
    if not rows or not all(rows) or len({len(row) for row in rows}) != 1:
        return None
    symbols = set("".join(rows))
    # The two games share symbols, but only a store has walls.
    look = _STORE if "#" in symbols else _LAKE
    return look if symbols <= look.glyphs.keys() else None


def _style(look: _Look, symbol: str, row: int, column: int) -> str:
    ground = look.ground[(row + column) % 2]
    return f"bold {look.colours.get(symbol, ground)} on {look.grounds.get(symbol, ground)}"
