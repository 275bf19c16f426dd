"""What the gRPC side needs of the HTTP edge: the sessions, and where agents find them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rollwire.rollout.agents.registry import PolicySessions

MODEL: Final = "policy"
"""Name of the one model that the edge serves."""


@dataclass(frozen=True)
class AgentDesk:
    """Where agents are served.

    Attributes:
        sessions: The sessions.
        base_url: Base URL for OpenAI's clients.
        model: Name of the model for calls.
    """

    sessions: PolicySessions
    base_url: str
    model: str = MODEL
