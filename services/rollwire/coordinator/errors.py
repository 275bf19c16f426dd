"""How a run ends early."""

from __future__ import annotations


class RunError(Exception):
    """The run cannot go on; the text is one line for the user: what happened, where, what to do."""
