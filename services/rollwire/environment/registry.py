"""Environment tags: which exist, what constructs them, and how they describe themselves.

A tag comes from this table of built-in environments or from the server's configuration. A request names a tag and
nothing else: no import ever follows from what a client sends.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Final

from rollwire.client.description import describe
from rollwire.client.results import InvalidResultError
from rollwire.environment.frozen_lake import FrozenLake, FrozenLakeThink
from rollwire.environment.options import OptionError, OptionSchema
from rollwire.environment.protocol import Environment
from rollwire.environment.sokoban import LargerSokoban, SimpleSokoban, Sokoban, SokobanDifferentGridVocab
from rollwire.rpc.errors import Reason, RollwireError, not_found
from rollwire.rpc.ids import TAG_PATTERN, is_tag
from rollwire.serving.config.sections import EnvironmentDefinition, EnvironmentSection
from rollwire.serving.logs import get_logger
from rollwire.serving.server import ServeError
from rollwire.v1 import environment_pb2 as pb

_log = get_logger(__name__)
ENTRY_POINT_GROUP: Final = "rollwire.environments"
BUILT_IN: Final[dict[str, Callable[..., Environment]]] = {
    "FrozenLake": FrozenLake,
    "FrozenLakeThink": FrozenLakeThink,
    "LargerSokoban": LargerSokoban,
    "SimpleSokoban": SimpleSokoban,
    "Sokoban": Sokoban,
    "SokobanDifferentGridVocab": SokobanDifferentGridVocab,
}


@dataclass(frozen=True)
class RegisteredEnvironment:
    """What stands behind one tag.

    Attributes:
        tag: The tag.
        factory: Constructs the environment from options.
        options: Options from the configuration, checked.
        schema: What the constructor takes.
        step_timeout_s: Longest time for a start or a turn.
        built_in: Whether its turns are known to be short and to end.
        description: As the catalogue shows it. The aggregation of metrics grows as environments declare more.
    """

    tag: str
    factory: Callable[..., Environment]
    options: Mapping[str, Any]
    schema: OptionSchema
    step_timeout_s: float
    built_in: bool
    description: pb.EnvironmentDescription = field(default_factory=pb.EnvironmentDescription)


class Registry:
    """The tags of a server, ascending."""

    def __init__(self, environments: Mapping[str, RegisteredEnvironment]) -> None:
        self.environments = dict(sorted(environments.items()))

    def find(self, tag: str) -> RegisteredEnvironment:
        """Returns what stands behind a tag. Raises `RollwireError` NOT_FOUND when there is none."""
        found = self.environments.get(tag)
        if found is None:
            raise self._unknown(tag)
        return found

    def _unknown(self, tag: str) -> RollwireError:
        near = difflib.get_close_matches(tag, self.environments, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        return not_found(
            Reason.UNKNOWN_ENVIRONMENT,
            f"no environment has the tag {tag!r}; {hint}Registered: {', '.join(self.environments)} "
            "(others go into the server's configuration under environment.definitions)",
            environment_tag=tag,
        )


def load_registry(section: EnvironmentSection) -> Registry:
    """Registers the built-in environments and those of the configuration, constructing each one once to try it.

    Raises:
        ServeError: A definition cannot be used.
    """
    definitions = {tag: EnvironmentDefinition(type=tag) for tag in BUILT_IN} | section.definitions
    return Registry({tag: _register(tag, definition) for tag, definition in definitions.items()})


def _register(tag: str, definition: EnvironmentDefinition) -> RegisteredEnvironment:
    where = f"environment.definitions.{tag}"
    if not is_tag(tag):
        raise ServeError(f"environment.definitions holds the tag {tag!r}; allowed: {TAG_PATTERN.pattern} without '..'")
    built_in = definition.type in BUILT_IN
    if not built_in:
        _log.info("loading an environment", environment_tag=tag, type=definition.type)
    factory = _resolve(definition.type, where)
    schema = OptionSchema(factory, getattr(factory, "config_only_options", ()))
    try:
        options = schema.configured(definition.options)
    except OptionError as error:
        raise ServeError(f"{where}.options.{error.name} is {error.value!r:.100}; allowed: {error.allowed}") from error
    try:
        sample = factory(**options)
        description = describe(tag, factory, sample, getattr(sample, "max_turns", None), schema.defaults(options))
    except InvalidResultError as error:
        raise ServeError(f"{where}: {definition.type} breaks the rules of an environment: {error}") from error
    except Exception as error:
        raise ServeError(
            f"{where}: {definition.type} cannot be constructed with options {options}: {_one_line(error)}"
        ) from error
    return RegisteredEnvironment(tag, factory, options, schema, definition.step_timeout_s, built_in, description)


def _resolve(type_name: str, where: str) -> Callable[..., Environment]:
    if type_name in BUILT_IN:
        return BUILT_IN[type_name]
    module_name, colon, attribute = type_name.partition(":")
    if colon:
        found = _import(module_name, attribute, type_name, where)
    else:
        points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
        if type_name not in points:
            known = ", ".join([*BUILT_IN, *sorted(points)])
            raise ServeError(
                f"{where}.type is {type_name!r}; allowed: a built-in environment or an installed entry point of the "
                f"group {ENTRY_POINT_GROUP} ({known}), or module:Class"
            )
        try:
            found = points[type_name].load()
        except Exception as error:
            raise ServeError(f"{where}.type: entry point {type_name} cannot be loaded: {_one_line(error)}") from error
    if not callable(found):
        raise ServeError(f"{where}.type is {type_name!r}, which is no class; allowed: a class with reset and step")
    return found  # type: ignore[no-any-return]


def _import(module_name: str, attribute: str, type_name: str, where: str) -> Any:
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ServeError(
            f"{where}.type is {type_name!r}, but module {module_name!r} cannot be imported: {_one_line(error)}; "
            "install it, or put its directory on PYTHONPATH"
        ) from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, vars(module), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ServeError(f"{where}.type is {type_name!r}, but module {module_name!r} has no {attribute!r}{hint}")
    return getattr(module, attribute)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
