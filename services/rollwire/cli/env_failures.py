"""What an environment's author needs to see when a game in this process fails: the stack trace, as Python prints it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import structlog


class StackKeeper:
    """A processor of the log that keeps the latest stack trace and lets nothing through but errors.

    Attributes:
        stack: The stack trace; empty while nothing has failed.
    """

    def __init__(self) -> None:
        self.stack = ""

    def install(self) -> None:
        """Puts it in front of the processors of the configured log."""
        structlog.configure(
            processors=[self, *structlog.get_config()["processors"]],
            wrapper_class=structlog.make_filtering_bound_logger("WARNING"),
        )

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Keeps a stack trace and drops what is no error."""
        self.stack = event.get("stack", self.stack)
        if method not in ("error", "critical", "exception"):
            raise structlog.DropEvent
        return event

    def explain(self, text: str, *, remote: bool) -> str:
        """Returns an error with its stack trace below, or where to find that.

        Args:
            text: The error, one line.
            remote: The environment runs elsewhere.
        """
        if remote:
            return f"{text}; the log of its server or provider has the stack trace"
        return "\n".join([text, *(f"  {line}" for line in self.stack.rstrip().splitlines())])
