"""From the name of an environment type to what constructs it. Nothing here follows from what a client sends."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Final

from rollwire.environment.frozen_lake import FrozenLake, FrozenLakeThink
from rollwire.environment.protocol import Environment
from rollwire.environment.sokoban import LargerSokoban, SimpleSokoban, Sokoban, SokobanDifferentGridVocab

Factory = Callable[..., Environment]
ENTRY_POINT_GROUP: Final = "rollwire.environments"
BUILT_IN: Final[dict[str, Factory]] = {
    "FrozenLake": FrozenLake,
    "FrozenLakeThink": FrozenLakeThink,
    "LargerSokoban": LargerSokoban,
    "SimpleSokoban": SimpleSokoban,
    "Sokoban": Sokoban,
    "SokobanDifferentGridVocab": SokobanDifferentGridVocab,
}
"""Types that are offered as tags of the same name: they need no options and no library."""

ADAPTERS: Final[dict[str, str]] = {
    "gem": "rollwire.environment.adapters.gem:Gem",
    "gymnasium": "rollwire.environment.adapters.gymnasium:Gymnasium",
    "openenv": "rollwire.environment.adapters.openenv:OpenEnv",
    "reasoning_gym": "rollwire.environment.adapters.reasoning_gym:ReasoningGym",
    "tools": "rollwire.environment.tools:Tools",
}
"""Types that a definition must give options: they are no tags."""


class UnknownTypeError(Exception):
    """A type that does not exist or cannot be loaded; the text goes on after the type's name."""


def resolve(type_name: str) -> Factory:
    """Returns what constructs an environment of a type.

    Args:
        type_name: Name of a built-in environment, an adapter or an installed entry point, or `module:Class`.

    Raises:
        UnknownTypeError: There is none, or it cannot be loaded.
    """
    if type_name in BUILT_IN:
        return BUILT_IN[type_name]
    module_name, colon, attribute = ADAPTERS.get(type_name, type_name).partition(":")
    found = _imported(module_name, attribute) if colon else _entry_point(type_name)
    if not callable(found):
        raise UnknownTypeError(", which is no class; allowed: a class with reset and step")
    return found  # type: ignore[no-any-return]


def _entry_point(type_name: str) -> Any:
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if type_name not in points:
        known = ", ".join([*BUILT_IN, *ADAPTERS, *sorted(points)])
        raise UnknownTypeError(
            f"; allowed: a built-in environment or an installed entry point of the group {ENTRY_POINT_GROUP} ({known}) "
            "or module:Class"
        )
    try:
        return points[type_name].load()
    except Exception as error:
        raise UnknownTypeError(f", but entry point {type_name} cannot be loaded: {one_line(error)}") from error


def _imported(module_name: str, attribute: str) -> Any:
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UnknownTypeError(
            f", but module {module_name!r} cannot be imported: {one_line(error)}; install it, or put its directory on "
            "PYTHONPATH"
        ) from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, vars(module), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnknownTypeError(f", but module {module_name!r} has no {attribute!r}{hint}")
    return getattr(module, attribute)


def one_line(error: BaseException) -> str:
    """Returns type and text of an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
