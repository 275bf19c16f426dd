"""Options of an environment as its constructor's signature shows them: names, defaults, what JSON can hold of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, get_type_hints

_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_NOT_JSON: Final = object()


def constructor_parameters(factory: Callable[..., object]) -> Iterator[tuple[inspect.Parameter, Any]]:
    """Yields the named parameters of a constructor and their types, following `**kwargs` up the base classes.

    Args:
        factory: Class, or function that returns an environment.
    """
    seen: set[str] = set()
    functions: list[Any] = [factory]
    if inspect.isclass(factory):
        functions = [vars(base)["__init__"] for base in factory.__mro__[:-1] if "__init__" in vars(base)]
    for function in functions:
        try:
            hints = get_type_hints(function)
        except Exception:  # names that exist only for the type checker
            hints = {}
        parameters = list(inspect.signature(function).parameters.values())
        for parameter in parameters[1:] if inspect.isclass(factory) else parameters:
            if parameter.kind in _NAMED and parameter.name not in seen:
                seen.add(parameter.name)
                yield parameter, hints.get(parameter.name, Any)
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            return


def integral(value: object) -> object:
    """Turns 4.0 into 4 at any depth: protobuf's Struct knows only floating-point numbers."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    if isinstance(value, Mapping):
        return {key: integral(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [integral(inner) for inner in value]
    return value


def json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that JSON can hold, as JSON holds them; leaves out the others."""
    return {name: plain for name, value in values.items() if (plain := _as_json(value)) is not _NOT_JSON}


def _as_json(value: object) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return _NOT_JSON
