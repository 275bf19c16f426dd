"""Checks before a run that agents can call the policy of every rollout server, by closing a session that never was."""

from __future__ import annotations

from collections.abc import Sequence

from rollwire.client.rollout import RolloutClient
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.tasks import run_all
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.ids import new_id
from rollwire.serving.config import RunConfig
from rollwire.serving.logs import get_logger
from rollwire.v1 import rollout_pb2, trajectory_pb2

_log = get_logger(__name__)


async def check_edges(config: RunConfig, clients: Sequence[RolloutClient], fence: trajectory_pb2.Fence) -> None:
    """Asks every rollout server, if the run has entries with `source: agent`.

    Raises:
        RunError: A server has no HTTP edge.
    """
    tags = [entry.tag for entry in config.environments if entry.source == "agent"]
    if tags:
        await run_all(_check(tags[0], client, fence) for client in clients)


async def _check(tag: str, client: RolloutClient, fence: trajectory_pb2.Fence) -> None:
    request = rollout_pb2.ClosePolicySessionRequest(fence=fence, session_id=new_id("session"), discard=True)
    try:
        await client.close_policy_session(request)
    except RollwireError as error:
        if error.reason == Reason.AGENTS_DISABLED:
            raise RunError(
                f"environments entry {tag!r} has source agent, but agents cannot call the policy of the rollout server "
                f"at {client.target}: {error.message}"
            ) from error
        if error.reason != Reason.UNKNOWN_SESSION:  # that one says that there is an edge
            _log.info("edge not checked", server=client.target, error=str(error))
