"""Policies that ship with Rollwire, and how configuration names them."""

from __future__ import annotations

import pathlib

BUILTIN_PREFIX = "builtin:"
_BUILTIN = {"tiny": "tiny"}


def resolve(name_or_path: str) -> pathlib.Path | str:
    """Turns a configured model into something `from_pretrained` takes.

    Args:
        name_or_path: `builtin:NAME`, a directory, or a hub id.

    Returns:
        The directory of a built-in policy; anything else unchanged.

    Raises:
        ValueError: There is no built-in policy of that name.
    """
    if not name_or_path.startswith(BUILTIN_PREFIX):
        return name_or_path
    name = name_or_path.removeprefix(BUILTIN_PREFIX)
    if name not in _BUILTIN:
        allowed = ", ".join(f"{BUILTIN_PREFIX}{known}" for known in sorted(_BUILTIN))
        raise ValueError(f"no built-in policy {name_or_path!r}; allowed: {allowed}, a directory, or a hub id")
    return pathlib.Path(__file__).parent / _BUILTIN[name]
