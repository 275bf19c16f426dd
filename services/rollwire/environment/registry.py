"""Environment tags: which exist, what constructs them, and how they describe themselves.

A tag comes from this table of built-in environments or from the server's configuration. A request names a tag and
nothing else: no import ever follows from what a client sends.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from rollwire.environment.answers import ANSWER_PATTERN, is_quick
from rollwire.environment.isolation.host import Isolation
from rollwire.environment.isolation.launch import ZygoteProcess
from rollwire.environment.isolation.pool import SeatLimits
from rollwire.environment.isolation.setup import ProcessSetup
from rollwire.environment.options import OptionError, OptionSchema
from rollwire.environment.registered import RegisteredEnvironment
from rollwire.environment.samples import UnusableError, describe_sample
from rollwire.environment.types import ADAPTERS, BUILT_IN, Factory, UnknownTypeError, resolve
from rollwire.rpc.ids import TAG_RULE, is_tag
from rollwire.serving.config.sections import EnvironmentDefinition, EnvironmentSection
from rollwire.serving.logs import get_logger
from rollwire.serving.server import ServeError

_log = get_logger(__name__)
_MAX_SESSIONS_PER_PROCESS = 1024


class Registry:
    """The tags of a server, ascending.

    Attributes:
        environments: By tag.
        isolations: Of those that run in processes of their own, by tag.
    """

    def __init__(
        self, environments: Mapping[str, RegisteredEnvironment], isolations: Mapping[str, Isolation] | None = None
    ) -> None:
        self.environments = dict(sorted(environments.items()))
        self.isolations = dict(isolations or {})

    def close(self) -> None:
        """Ends the processes of environments, where no host has taken them over."""
        for isolation in self.isolations.values():
            isolation.zygote.kill()


@dataclass(frozen=True)
class _Checked:
    """A definition whose type exists and whose options are allowed."""

    tag: str
    definition: EnvironmentDefinition
    factory: Factory
    schema: OptionSchema
    options: Mapping[str, Any]

    @property
    def where(self) -> str:
        return f"environment.definitions.{self.tag}"


def load_registry(section: EnvironmentSection, *, show_output: bool = False) -> Registry:
    """Registers the built-in environments and those of the configuration, constructing each one once to try it.

    Environments that run in processes of their own are constructed there, all at the same time. `Registry.close`, or
    the hosts that take them over, end these processes; otherwise they end with this one.

    Args:
        section: The configuration.
        show_output: Write what environments in processes print to standard error, too.

    Raises:
        ServeError: A definition cannot be used.
    """
    definitions = {tag: EnvironmentDefinition(type=tag) for tag in BUILT_IN} | section.definitions
    checked = [_check(tag, definition) for tag, definition in definitions.items()]
    setups = {item.tag: _setup(item, show_output=show_output) for item in checked if _isolation(item) == "process"}
    limits = {item.tag: _seat_limits(item) for item in checked if item.tag in setups}
    zygotes: dict[str, ZygoteProcess] = {}
    environments: dict[str, RegisteredEnvironment] = {}
    try:
        for item in checked:
            with _explained(item):
                if item.tag in setups:
                    zygotes[item.tag] = ZygoteProcess(setups[item.tag])
        for item in checked:
            with _explained(item):
                environments[item.tag] = _register(item, zygotes.get(item.tag))
    except BaseException:
        for zygote in zygotes.values():
            zygote.kill()
        raise
    return Registry(environments, {tag: Isolation(setups[tag], limits[tag], zygote) for tag, zygote in zygotes.items()})


def _check(tag: str, definition: EnvironmentDefinition) -> _Checked:
    where = f"environment.definitions.{tag}"
    if not is_tag(tag):
        raise ServeError(f"environment.definitions holds the tag {tag!r}; allowed: {TAG_RULE}")
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
    return _Checked(tag, definition, factory, schema, options)


def _isolation(item: _Checked) -> Literal["thread", "process"]:
    if item.definition.isolation != "auto":
        return item.definition.isolation
    own = item.definition.type in BUILT_IN or item.definition.type in ADAPTERS
    if own and not is_quick(item.options.get("action_pattern", ANSWER_PATTERN)):
        return "process"  # a regular expression that backtracks holds the interpreter: nothing else there goes on
    if item.definition.type in BUILT_IN:
        return "thread"
    declared = getattr(item.factory, "isolation", "process")
    if declared not in ("thread", "process"):
        raise ServeError(
            f"{item.where}: the class of {item.definition.type} has isolation {declared!r:.100}; allowed: thread "
            "or process"
        )
    return "process" if declared == "process" else "thread"


def _setup(item: _Checked, *, show_output: bool) -> ProcessSetup:
    definition = item.definition
    # Options as they were written: their values in the constructor's types need not fit into JSON.
    return ProcessSetup(
        item.tag, definition.type, definition.options, definition.memory_mib, tuple(sys.path), show_output
    )


def _seat_limits(item: _Checked) -> SeatLimits:
    definition = item.definition
    sessions = definition.sessions_per_process or getattr(item.factory, "sessions_per_process", 1)
    if not isinstance(sessions, int) or not 1 <= sessions <= _MAX_SESSIONS_PER_PROCESS:
        raise ServeError(
            f"{item.where}: the class of {definition.type} has sessions_per_process {sessions!r:.100}; allowed: 1 to "
            f"{_MAX_SESSIONS_PER_PROCESS}"
        )
    return SeatLimits(sessions, definition.max_processes, definition.recycle_after_sessions)


def _register(item: _Checked, zygote: ZygoteProcess | None) -> RegisteredEnvironment:
    definition = item.definition
    built_in = definition.type in BUILT_IN
    if zygote is not None:
        description = zygote.await_ready()
    else:
        sample, description = describe_sample(item.tag, definition.type, item.factory, item.schema, item.options)
        # Drawing a picture takes longer than the event loop may wait.
        built_in = built_in and not getattr(sample, "observation_images", False)
    return RegisteredEnvironment(
        item.tag, item.factory, item.options, item.schema, definition.step_timeout_s, built_in, description
    )


@contextmanager
def _explained(item: _Checked) -> Iterator[None]:
    try:
        yield
    except UnusableError as error:
        raise ServeError(f"{item.where}: {error}") from error
