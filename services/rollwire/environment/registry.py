"""Environment tags: which exist, what constructs them, and how they describe themselves.

A tag comes from this table of built-in environments or from the server's configuration. A request names a tag and
nothing else: no import ever follows from what a client sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollwire.client.description import describe
from rollwire.client.results import InvalidResultError
from rollwire.environment.options import OptionError, OptionSchema
from rollwire.environment.protocol import Environment
from rollwire.environment.types import BUILT_IN, UnknownTypeError, one_line, resolve
from rollwire.rpc.ids import TAG_PATTERN, is_tag
from rollwire.serving.config.sections import EnvironmentDefinition, EnvironmentSection
from rollwire.serving.logs import get_logger
from rollwire.serving.server import ServeError
from rollwire.v1 import environment_pb2 as pb

_log = get_logger(__name__)


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
    if definition.type not in BUILT_IN:
        _log.info("loading an environment", environment_tag=tag, type=definition.type)
    try:
        factory = resolve(definition.type)
    except UnknownTypeError as error:
        raise ServeError(f"{where}.type is {definition.type!r}{error}") from error
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
            f"{where}: {definition.type} cannot be constructed with options {options}: {one_line(error)}"
        ) from error
    # Drawing a picture takes longer than the event loop may wait.
    built_in = definition.type in BUILT_IN and not getattr(sample, "observation_images", False)
    return RegisteredEnvironment(tag, factory, options, schema, definition.step_timeout_s, built_in, description)
