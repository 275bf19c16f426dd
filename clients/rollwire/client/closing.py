"""Environments are closed, whatever became of their start: what a constructor took must be given back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


def close_environment(environment: Any) -> None:
    """Lets an environment free what it holds, if it has something to free. Raises what its `close` raises."""
    close = getattr(environment, "close", None)
    if callable(close):
        close()


@contextmanager
def closed_on_failure(environment: Any) -> Iterator[None]:
    """Closes an environment whose reset fails, without hiding why it did."""
    try:
        yield
    except BaseException:
        with suppress(BaseException):  # it was never reset: some close nothing then, with an error
            close_environment(environment)
        raise
