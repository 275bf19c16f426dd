"""What the HTTP edge says when it cannot answer: OpenAI's error body, with a stable code of docs/agents.md."""

from __future__ import annotations

import math
from typing import Any, Final

import grpc

from rollwire.rpc.errors import Reason, RollwireError

_RETRY_S: Final = 1.0
_MOST_SHOWN: Final = 100


class CallError(Exception):
    """A call that is refused or has failed.

    Attributes:
        status: HTTP status.
        code: Stable name of the cause.
        message: One line for people: what was wrong, the value, what is allowed, what to do.
        param: Name of the offending parameter, if there is one.
        retry_after_s: When a repeat of the same call makes sense, how long to wait; else None.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Returns the JSON body."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Returns the headers: OpenAI's clients repeat 409 and 5xx by themselves, unless they are told not to."""
        if self.retry_after_s is None:
            return {"x-should-retry": "false"}
        return {"retry-after": str(math.ceil(self.retry_after_s)), "x-should-retry": "true"}


def bad_request(param: str, value: object, allowed: str, code: str = "invalid_value") -> CallError:
    """Returns the error for a parameter outside its range.

    Args:
        param: Path of the parameter, such as `messages[2].role`.
        value: The offending value; shown shortened.
        allowed: What is allowed.
        code: Stable name.
    """
    shown = repr(value)
    if len(shown) > _MOST_SHOWN:
        shown = shown[:_MOST_SHOWN] + "…"
    return CallError(400, code, f"{param} is {shown}; allowed: {allowed}", param=param)


def too_long(tokens: int, limit: int, *, at_least: bool = False) -> CallError:
    """Returns the error for a prompt that leaves no room for an answer.

    Args:
        tokens: Length of the prompt.
        limit: Most tokens of a call, prompt and answer together.
        at_least: The prompt may be longer than `tokens`.
    """
    return CallError(
        400,
        "context_length_exceeded",
        f"the prompt has {'at least ' if at_least else ''}{tokens} tokens; allowed: at most {limit - 1}, so that a "
        f"call of {limit} tokens has room for an answer; shorten it, or raise rollout.max_episode_tokens of the run",
        param="prompt",
    )


def unknown_key() -> CallError:
    """Returns the error for a key that opens nothing."""
    return CallError(
        401,
        "invalid_api_key",
        "the bearer key is missing or unknown, or its session was closed, or has ended because no call came within its "
        "lease; open another session and use its key",
    )


def session_closed() -> CallError:
    """Returns the error of a call whose session ended while it ran."""
    return CallError(
        409, "session_closed", "the session was closed while this call ran; its answer is not part of the record"
    )


def from_policy(error: RollwireError) -> CallError:
    """Returns what an error of the policy means to an agent."""
    if error.reason == Reason.NO_WEIGHTS or error.code is grpc.StatusCode.UNAVAILABLE:
        return no_weights()
    return engine_failed(error.message)


def no_weights() -> CallError:
    """Returns the error of a server that serves nothing yet."""
    return CallError(
        503, "no_weights", "the server has no weights yet; ask again when it has been updated", retry_after_s=_RETRY_S
    )


def draining() -> CallError:
    """Returns the error of a server that is shutting down."""
    return CallError(503, "draining", "the server is shutting down; open a session on another one")


def engine_failed(message: str) -> CallError:
    """Returns the error of an engine that failed on a call. The text is one line without server paths."""
    return CallError(
        502, "engine_error", f"the engine failed on this call: {message}; ask again", retry_after_s=_RETRY_S
    )


def too_many(limit: int, of_what: str) -> CallError:
    """Returns the error of a limit on calls at once."""
    return CallError(
        429,
        "too_many_calls",
        f"{limit} calls {of_what} run already, which is the limit; ask again",
        retry_after_s=_RETRY_S,
    )
