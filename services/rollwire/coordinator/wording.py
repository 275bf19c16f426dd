"""How numbers are told to people."""

from __future__ import annotations


def counted(number: float, noun: str, plural: str | None = None) -> str:
    """Returns a number with its noun: `1 step`, `1,280 steps`; the plural is that with an s unless given."""
    return f"{number:,.0f} {noun if number == 1 else plural or f'{noun}s'}"
