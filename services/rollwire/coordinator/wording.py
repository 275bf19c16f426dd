"""How numbers and mistakes are told to people."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

_ALIKE: Final = 0.7


def counted(number: float, noun: str, plural: str | None = None) -> str:
    """Returns a number with its noun: `1 step`, `1,280 steps`; the plural is that with an s unless given."""
    return f"{number:,.0f} {noun if number == 1 else plural or f'{noun}s'}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ` (did you mean Lake?)` for a name that is not known, but much like one that is; otherwise nothing."""
    by_folded = {other.casefold(): other for other in known}
    found = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=_ALIKE)
    return f" (did you mean {by_folded[found[0]]}?)" if found else ""
