"""Options of an environment: what its constructor takes, checked before anything is constructed."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from rollwire.client.options import constructor_parameters, integral, json_values


class OptionError(Exception):
    """An option that the environment does not take.

    Attributes:
        name: The option.
        value: Its value.
        allowed: What is allowed instead.
    """

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"option {name} is {value!r:.100}; allowed: {allowed}")
        self.name = name
        self.value = value
        self.allowed = allowed


class OptionSchema:
    """Names, types and defaults of the options of one environment type, read from its constructor.

    A constructor that takes `**kwargs` also takes what the constructor of its base class takes.
    """

    def __init__(self, factory: Callable[..., object], config_only: Collection[str] = ()) -> None:
        """Reads the constructor.

        Args:
            factory: Class, or function that returns an environment.
            config_only: Options that requests must not set.
        """
        self._config_only = frozenset(config_only)
        self._types: dict[str, TypeAdapter[Any]] = {}
        self._defaults: dict[str, Any] = {}
        self.required: list[str] = []
        for parameter, annotation in constructor_parameters(factory):
            self._types[parameter.name] = _adapter(annotation)
            if parameter.default is inspect.Parameter.empty:
                self.required.append(parameter.name)
            else:
                self._defaults[parameter.name] = parameter.default

    def configured(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Checks options from the server's configuration and returns them, converted to the constructor's types.

        Raises:
            OptionError: One is unknown, of the wrong type, or required and missing.
        """
        for name in self.required:
            if name not in options:
                raise OptionError(name, None, "a value; the constructor requires it")
        return {name: self._checked(name, value, list(self._types)) for name, value in options.items()}

    def requested(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Checks options from a request and returns them, converted to the constructor's types.

        Raises:
            OptionError: One is unknown, of the wrong type, or reserved to the server's configuration.
        """
        return {name: self._checked(name, value, self.requestable) for name, value in options.items()}

    @property
    def requestable(self) -> list[str]:
        """Names of the options that a request may set."""
        return [name for name in self._types if name not in self._config_only]

    def defaults(self, configured: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the effective defaults of the options that a request may set, as far as JSON can show them."""
        effective = {**self._defaults, **configured}
        return json_values({name: effective[name] for name in self.requestable if name in effective})

    def _checked(self, name: str, value: object, allowed: list[str]) -> Any:
        if name not in allowed:
            raise OptionError(name, value, self._advice(name, allowed))
        try:
            # JSON's own types, strictly: no "4" for 4, no 1 for true, but lists for tuples.
            return self._types[name].validate_json(json.dumps(integral(value)), strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            inside = "".join(f"[{part!r}]" for part in first["loc"])
            allowed_text = first["msg"].removeprefix("Input should be ")
            raise OptionError(name + inside, first["input"] if inside else value, allowed_text) from error
        except (TypeError, ValueError) as error:
            raise OptionError(name, value, "a value that JSON can hold") from error

    def _advice(self, name: str, allowed: list[str]) -> str:
        if name in self._config_only:
            return "only in the server's configuration (environment.definitions), not in a request"
        if not allowed:
            return "no option at all"
        near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"only the options {', '.join(sorted(allowed))}{hint}"


def _adapter(annotation: Any) -> TypeAdapter[Any]:
    for config in (ConfigDict(arbitrary_types_allowed=True), None):
        try:
            return TypeAdapter(annotation, config=config)
        except PydanticUserError:  # a model brings its own configuration
            continue
    return TypeAdapter(Any)
