"""One environment of a provider: what its tag stands for, and how its starts and turns become messages.

Everything here runs the user's code and may block: call it from a thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import json_format

from rollwire.client.closing import close_environment, closed_on_failure
from rollwire.client.description import describe
from rollwire.client.options import constructor_parameters, integral, json_values
from rollwire.client.results import InvalidResultError, failure_of, start_response, step_response
from rollwire.rpc.errors import Reason, RollwireError, invalid_field
from rollwire.rpc.ids import TAG_RULE, is_tag
from rollwire.v1 import environment_pb2 as pb


@dataclass(frozen=True)
class ProvidedEnvironment:
    """What a provider serves under one tag.

    Attributes:
        factory: Constructs the environment from options.
        description: As the server's catalogue shows it.
        max_turns: Turn limit where the environment itself names none.
    """

    factory: Callable[..., Any]
    description: pb.EnvironmentDescription
    max_turns: int | None

    def start(self, options: Mapping[str, Any], seed: int) -> tuple[Any, pb.OpenSessionResponse]:
        """Constructs an environment and resets it; returns it with its start state.

        Raises:
            RollwireError: INVALID_ARGUMENT: the constructor refuses the options.
            Exception: Whatever the environment raises.
        """
        try:
            environment = self.factory(**options)
        except (TypeError, ValueError) as error:
            if not options:
                raise
            reason = failure_of(error).message
            message = f"the environment refuses the options: {reason}; they were {dict(options)!r:.200}"
            raise RollwireError(
                grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD, message, fields={"options": message}
            ) from error
        with closed_on_failure(environment):
            reply = environment.reset(seed=seed) if _takes_seed_by_name(environment) else environment.reset(seed)
            return environment, start_response(reply, turn_limit_of(environment, self.max_turns))

    def check_options(self, request: pb.OpenSessionRequest) -> dict[str, Any]:
        """Returns the options of a request as keyword arguments.

        Raises:
            RollwireError: INVALID_ARGUMENT: the constructor has no such argument, or a request must not set it.
        """
        options: dict[str, Any] = json_format.MessageToDict(request.options)
        allowed = _requestable(self.factory)
        for name, value in options.items():
            if name not in allowed:
                raise invalid_field(
                    f"options.{name}", value, f"only {', '.join(sorted(allowed)) or 'no option at all'}"
                )
        return {name: integral(value) for name, value in options.items()}


def provided_environment(tag: str, factory: Callable[..., Any], max_turns: int | None) -> ProvidedEnvironment:
    """Constructs one environment to try it, and describes it.

    Args:
        tag: Tag that it is served under.
        factory: A class, or a function that returns an environment; its keyword arguments are the options.
        max_turns: Turn limit for environments that name none themselves.

    Raises:
        ValueError: It cannot be served; the text is one line for the user.
    """
    if not is_tag(tag):
        raise ValueError(f"the tag is {tag!r}; allowed: {TAG_RULE}")
    if not callable(factory):
        raise ValueError(f"environment {tag} is {factory!r:.100}; allowed: a class, or a function that returns one")
    try:
        sample = factory()
    except Exception as error:
        raise ValueError(
            f"environment {tag} cannot be constructed without options: {type(error).__name__}: {error}"
        ) from error
    defaults = {
        parameter.name: parameter.default
        for parameter, _ in constructor_parameters(factory)
        if parameter.default is not inspect.Parameter.empty and parameter.name in _requestable(factory)
    }
    try:
        limit = turn_limit_of(sample, max_turns)
        if limit is None:
            raise InvalidResultError("it has no max_turns; set that attribute, or pass max_turns= to serve_environment")
        description = describe(tag, factory, sample, limit, json_values(defaults))
    except InvalidResultError as error:
        raise ValueError(f"environment {tag} breaks the rules of an environment: {error}") from error
    try:
        close_environment(sample)
    except Exception as error:
        raise ValueError(f"environment {tag} cannot be closed: {type(error).__name__}: {error}") from error
    return ProvidedEnvironment(factory, description, max_turns)


def turn_limit_of(environment: Any, otherwise: int | None) -> Any:
    """Returns the turn limit that an environment names: `max_turns`, or gymnasium's `spec.max_episode_steps`."""
    for holder in (environment, getattr(environment, "unwrapped", None)):
        limit = getattr(holder, "max_turns", None)
        if limit is not None:
            return limit
    limit = getattr(getattr(environment, "spec", None), "max_episode_steps", None)
    return otherwise if limit is None else limit


def play_turn(environment: Any, action: str) -> pb.StepResponse:
    """Plays a turn. Raises `InvalidResultError`, or whatever the environment raises."""
    return step_response(environment.step(action))


def _requestable(factory: Callable[..., Any]) -> set[str]:
    reserved = set(getattr(factory, "config_only_options", ()))
    return {parameter.name for parameter, _ in constructor_parameters(factory)} - reserved


def _takes_seed_by_name(environment: Any) -> bool:
    """Gymnasium's `reset` takes the seed by name alone; others may call it differently and take it by position."""
    parameters = inspect.signature(environment.reset).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return True
    seed = parameters.get("seed")
    return seed is not None and seed.kind is not inspect.Parameter.POSITIONAL_ONLY
