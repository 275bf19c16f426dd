"""What a zygote has to know, and how it makes an environment ready."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rollwire.environment.options import OptionSchema
from rollwire.environment.samples import describe_sample
from rollwire.environment.types import Factory, resolve
from rollwire.v1 import environment_pb2 as pb


@dataclass(frozen=True)
class ProcessSetup:
    """An environment and its limits, as they travel to its processes.

    Attributes:
        tag: Its tag.
        type: As in the configuration.
        options: Options of the configuration, as JSON holds them.
        memory_mib: Most memory of one process; 0 is unlimited.
        search_path: Where modules are found.
        show_output: What workers print goes to the server's standard error, too.
    """

    tag: str
    type: str
    options: Mapping[str, Any]
    memory_mib: int
    search_path: tuple[str, ...]
    show_output: bool = False

    def to_json(self) -> bytes:
        """Returns it as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> ProcessSetup:
        """Reads what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "search_path": tuple(fields["search_path"])})


@dataclass(frozen=True)
class Prepared:
    """An environment that can be constructed.

    Attributes:
        factory: Constructs it.
        schema: Its options.
        options: Those of the configuration, converted to the constructor's types.
    """

    factory: Factory
    schema: OptionSchema
    options: Mapping[str, Any]


def program(module: str, setup: ProcessSetup) -> list[str]:
    """Returns the command line of a program of this package, which finds modules where the server does.

    Args:
        module: `zygote` or `worker`; further arguments are its own.
        setup: Holds the search path.
    """
    path = f"import sys; sys.path[:] = {list(setup.search_path)!r}"
    call = f"from rollwire.environment.isolation.{module} import main; main()"
    return [sys.executable, "-P", "-c", f"{path}; {call}"]


def prepare(setup: ProcessSetup) -> Prepared:
    """Imports the environment's module. Raises whatever that raises."""
    sys.path[:] = setup.search_path
    factory = resolve(setup.type)
    schema = OptionSchema(factory, getattr(factory, "config_only_options", ()))
    return Prepared(factory, schema, schema.configured(setup.options))


def try_out(setup: ProcessSetup, prepared: Prepared) -> pb.EnvironmentDescription:
    """Constructs one environment, which also imports what its constructor imports, and describes it.

    Raises:
        UnusableError: It cannot be used.
    """
    return describe_sample(setup.tag, setup.type, prepared.factory, prepared.schema, prepared.options)[1]
