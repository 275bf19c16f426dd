"""What users see when something is wrong: one line for each problem and an exit status; never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rollwire.coordinator.errors import ERROR_PREFIX, RunError

FAILED: Final = 1
BAD_CONFIGURATION: Final = 2


@contextmanager
def user_errors() -> Iterator[None]:
    """Ends the process with a message for errors that a user can cause; anything else is a bug and passes through."""
    from rollwire.rpc.errors import RollwireError
    from rollwire.serving.config import ConfigError
    from rollwire.serving.server import ServeError

    try:
        yield
    except ConfigError as error:
        fail(str(error), BAD_CONFIGURATION)
    except (RunError, ServeError) as error:
        fail(str(error), FAILED)
    except RollwireError as error:
        fail(error.message, FAILED)


def fail(text: str, status: int) -> None:
    """Prints a problem and ends the process.

    Args:
        text: What is wrong. Indented lines, such as the end of a log, belong to the line above them.
        status: Exit status.
    """
    show(text)
    raise SystemExit(status)


def show(text: str) -> None:
    """Prints a problem as `fail` does."""
    for line in text.splitlines():
        print(line if line.startswith(" ") else f"{ERROR_PREFIX}{line}", file=sys.stderr)
