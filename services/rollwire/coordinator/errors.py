"""How a run ends early."""

from __future__ import annotations

from typing import Final

ERROR_PREFIX: Final = "error: "
"""Begins the line in which a command or a server says why it ends; the launcher looks for it in the log of a server."""


class RunError(Exception):
    """The run cannot go on; the text is one line for the user: what happened, where, what to do."""


class ResumeError(RunError):
    """The run can be resumed neither from a checkpoint nor from the learner as it is."""
