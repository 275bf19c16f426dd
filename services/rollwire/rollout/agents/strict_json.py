"""JSON of policies and agents that can be written again: it is recorded, compared and sent on. Pure."""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

MAX_DEPTH: Final = 100
"""Deepest nesting. Beyond some hundred levels it would depend on the caller's stack whether it can be written again."""


def strict_loads(text: str) -> Any:
    """Returns what a JSON text holds.

    Raises:
        ValueError: It is no JSON, or holds what could not be written again: a number that is not finite, half of a
            surrogate pair, nesting deeper than `MAX_DEPTH`.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    # Counted first: a prompt of many token ids need not be walked through.
    if text.count("[") + text.count("{") > MAX_DEPTH and _deeper(value, MAX_DEPTH):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _deeper(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(levels == 0 or _deeper(one, levels - 1) for one in inner)
