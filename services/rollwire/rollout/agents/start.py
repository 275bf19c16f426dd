"""Builds the HTTP edge from the configuration; the web framework is loaded only where it is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollwire.rollout.agents.answering import Answering
from rollwire.rollout.agents.desk import AgentDesk
from rollwire.rollout.agents.registry import PolicySessions
from rollwire.rollout.chat import ChatEncoder
from rollwire.rollout.policy import Policy
from rollwire.rpc.limits import MIB
from rollwire.serving.config.sections import HttpSection
from rollwire.serving.server import ServeError

if TYPE_CHECKING:
    from rollwire.rollout.agents.http_server import HttpServer


def listen(section: HttpSection) -> HttpServer | None:
    """Takes the edge's port; None when the edge is off.

    Raises:
        ServeError: The web framework is missing, or the port cannot be bound.
    """
    if section.address is None:
        return None
    try:
        from rollwire.rollout.agents.http_server import HttpServer
    except ImportError as error:
        raise ServeError(
            f"rollout.http.address is {section.address!r}, which needs the extra `agents` ({error.name} is missing): "
            "pip install 'rollwire[agents]', or set rollout.http.address=null"
        ) from error
    return HttpServer(section)


async def serve_agents(
    http: HttpServer, section: HttpSection, policy: Policy, encoder: ChatEncoder, sessions: PolicySessions
) -> AgentDesk:
    """Serves agents from now on."""
    from rollwire.rollout.agents.edge import Edge

    answering = Answering(policy, encoder, sessions)
    await http.start(Edge(answering, sessions, section.max_concurrent_calls, section.max_request_mib * MIB))
    return AgentDesk(sessions, http.base_url)
