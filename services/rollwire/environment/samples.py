"""A definition is tried before it is offered: one environment is constructed, and describes itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rollwire.client.closing import close_environment
from rollwire.client.description import describe
from rollwire.client.results import InvalidResultError
from rollwire.environment.options import OptionSchema
from rollwire.environment.types import one_line
from rollwire.v1 import environment_pb2 as pb


class UnusableError(Exception):
    """An environment that cannot be used; the text is one line that goes on after the definition's name."""


def describe_sample(
    tag: str, type_name: str, factory: Callable[..., Any], schema: OptionSchema, options: Mapping[str, Any]
) -> tuple[Any, pb.EnvironmentDescription]:
    """Constructs an environment.

    Args:
        tag: Its tag.
        type_name: Its type as the configuration names it.
        factory: Constructs it.
        schema: Its options.
        options: Those of the configuration, checked.

    Returns:
        The environment, closed and never reset, and its description.

    Raises:
        UnusableError: It cannot be constructed, or breaks the rules of an environment.
    """
    try:
        sample = factory(**options)
        try:
            limit = getattr(sample, "max_turns", None)
            return sample, describe(tag, factory, sample, limit, schema.defaults(options))
        finally:
            with suppress(Exception):  # it was never reset: some close nothing then, with an error
                close_environment(sample)
    except InvalidResultError as error:
        raise UnusableError(f"{type_name} breaks the rules of an environment: {error}") from error
    except Exception as error:
        raise UnusableError(
            f"{type_name} cannot be constructed: {one_line(error)}; its options were {dict(options)!r:.200}"
        ) from error
