"""The parameters that chat and text completions share: read, checked against the session, the unknown refused. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rollwire.rollout.agents.desk import MODEL
from rollwire.rollout.agents.errors import CallError, bad_request
from rollwire.rollout.agents.strict_json import strict_loads
from rollwire.rollout.engine import Sampling

MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
_EQUAL: Final = 1e-6  # settings of a session are 32-bit numbers, an agent's are not
_MOST_SEED: Final = 1 << 63

WITHOUT_EFFECT: Final = frozenset(
    {"user", "metadata", "service_tier", "store", "prompt_cache_key", "safety_identifier", "prompt_cache_retention"}
)
"""Parameters that are taken and change nothing."""

# Parameters that are taken with the value that switches them off.
_OFF: Final[dict[str, tuple[Any, ...]]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "n": (1,),
}
_MISSING: Final = object()


@dataclass(frozen=True)
class Options:
    """How one call is answered.

    Attributes:
        sampling: The session's settings with this call's most tokens.
        seed: Chooses among the draws of this call; None for the session's own.
        stops: Texts that end the answer.
        stream: Send the answer piece by piece.
        include_usage: End a stream with the number of tokens.
        logprobs: Report the log-probabilities of the sampled tokens.
    """

    sampling: Sampling
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool


class Parameters:
    """A request's parameters; each is taken once, and what is left at the end is unknown. `null` counts as absent.

    Args:
        body: The request.

    Raises:
        CallError: It is not a JSON object in UTF-8.
    """

    def __init__(self, body: bytes) -> None:
        try:
            content = strict_loads(body.decode("utf-8"))
        except ValueError as error:
            raise CallError(
                400, "invalid_json", f"the body is no JSON in UTF-8 ({error}); send a JSON object"
            ) from error
        if not isinstance(content, dict):
            raise CallError(400, "invalid_json", f"the body is a {type(content).__name__}; send a JSON object")
        self._left: dict[str, Any] = {name: value for name, value in content.items() if value is not None}

    def take(self, name: str, default: Any = None) -> Any:
        """Returns a parameter."""
        return self._left.pop(name, default)

    def flag(self, name: str) -> bool:
        """Returns a parameter that is true or false. Raises `CallError`."""
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise bad_request(name, value, "true or false")
        return value

    def integer(self, name: str, least: int, most: int, why: str = "") -> int | None:
        """Returns a whole number, None if it is absent; `why` says where the range comes from. Raises `CallError`."""
        value = self.take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most):
            raise bad_request(name, value, f"a whole number from {least} to {most}{why}")
        return value

    def only(self, name: str, *allowed: Any, why: str = "") -> None:
        """Refuses any value of a parameter but those given. Raises `CallError`."""
        value = self.take(name, _MISSING)
        if value is not _MISSING and value not in allowed:
            texts = " or ".join(json.dumps(one) for one in allowed)
            raise bad_request(name, value, texts + (f": {why}" if why else ""), "unsupported_value")

    def finish(self) -> None:
        """Refuses what was not taken. Raises `CallError`."""
        for name in WITHOUT_EFFECT:
            self.take(name)
        if self._left:
            name = min(self._left)
            raise CallError(
                400,
                "unsupported_parameter",
                f"{name[:100]!r} is not supported here; leave it out (docs/agents.md lists what is)",
                param=name[:100],
            )


def read_options(
    parameters: Parameters, session: Sampling, *, logprobs: bool, limits: Sequence[str] = ("max_tokens",)
) -> Options:
    """Returns the options of a call.

    Args:
        parameters: What was sent.
        session: The session's settings.
        logprobs: Whether log-probabilities were asked for.
        limits: Names of the parameter for the most tokens.

    Raises:
        CallError: A parameter is outside its range, or not the session's.
    """
    model = parameters.take("model")
    if model != MODEL:
        message = f"there is no model {str(model)[:100]!r}; this server has {MODEL!r}"
        raise CallError(404, "model_not_found", message, param="model")
    _check_session_settings(parameters, session)
    for name, allowed in _OFF.items():
        parameters.only(name, *allowed, why="draws follow the session's settings, one answer per call")
    most, why = session.max_tokens, ", the session's limit (rollout.max_new_tokens_per_turn)"
    wanted = [value for name in limits if (value := parameters.integer(name, 1, most, why)) is not None]
    stream = parameters.flag("stream")
    return Options(
        sampling=replace(session, max_tokens=min([session.max_tokens, *wanted])),
        seed=parameters.integer("seed", -_MOST_SEED, _MOST_SEED - 1),
        stops=_stops(parameters.take("stop")),
        stream=stream,
        include_usage=_include_usage(parameters.take("stream_options"), stream),
        logprobs=logprobs,
    )


def _check_session_settings(parameters: Parameters, session: Sampling) -> None:
    """Refuses other settings than the session's: the log-probabilities that training compares with depend on them."""
    for name, own in (("temperature", session.temperature), ("top_p", session.top_p), ("top_k", session.top_k)):
        value = parameters.take(name)
        if value is None or (name == "top_k" and own == 0 and value == -1):
            continue
        # Compared, not subtracted: a whole number may be too large for a float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not own - _EQUAL <= value <= own + _EQUAL:
            allowed = f"{own:g}, the session's setting: leave it out, or change sampling.{name} of the run"
            raise bad_request(name, value, allowed, "unsupported_value")


def _stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if (
        not isinstance(texts, list)
        or len(texts) > MAX_STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARACTERS for text in texts)
    ):
        raise bad_request("stop", value, f"a text or up to {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(texts)


def _include_usage(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not stream:
        raise bad_request("stream_options", value, "null without stream=true")
    known = {"include_usage", "include_obfuscation"}
    if not isinstance(value, dict) or not value.keys() <= known or not all(isinstance(v, bool) for v in value.values()):
        raise bad_request("stream_options", value, '{"include_usage": true or false}')
    return bool(value.get("include_usage", False))
