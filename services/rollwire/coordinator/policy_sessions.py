"""Sessions on rollout servers in which agents call the policy: opened on the least busy one, closed, listed."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import Final

import grpc

from rollwire.coordinator.agent_desk import Place
from rollwire.coordinator.agent_requests import MAX_CALLS, duration
from rollwire.coordinator.budgets import Budgets
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.rollout_pool import RolloutPool, RolloutServer
from rollwire.coordinator.seeds import episode_seed
from rollwire.coordinator.weight_push import LOST_CODES
from rollwire.rpc.errors import Reason, RollwireError, exhausted
from rollwire.rpc.ids import new_id, new_secret
from rollwire.rpc.limits import INTERNAL_MESSAGE_BYTES
from rollwire.serving.logs import get_logger
from rollwire.v1 import rollout_pb2, trajectory_pb2

SERVER_WAIT_S: Final = 2.0
"""How long an agent waits for a rollout server with room before it is told to ask again."""

RETRY_S: Final = 1.0
_BYTES_PER_TOKEN: Final = 12
_log = get_logger(__name__)


@dataclass(frozen=True)
class PolicySession:
    """A session that is open on a rollout server.

    Attributes:
        session_id: Identifier.
        api_key: Bearer key; the server knows only its digest.
        server: Where it is.
        base_url: Base URL for OpenAI's clients.
        model: Name of the model for calls.
    """

    session_id: str
    api_key: str
    server: RolloutServer
    base_url: str
    model: str


class PolicySessions:
    """Opens and closes sessions on the servers of a pool.

    Args:
        pool: The rollout servers.
        fence: Identifies this coordinator.
        budgets: Bounds of retries.
    """

    def __init__(self, pool: RolloutPool, fence: trajectory_pb2.Fence, budgets: Budgets) -> None:
        self._pool = pool
        self._fence = fence
        self._budgets = budgets

    async def open(self, place: Place, lease_s: float) -> PolicySession:
        """Opens a session for an episode on the least busy server.

        Raises:
            RollwireError: `EPISODES_EXHAUSTED` when no server has room or answers now.
            RunError: No server is left, or one refuses sessions.
        """
        for _ in self._pool.servers:
            server = await self._acquire()
            request, key = self._open_request(place, lease_s)
            try:
                answer = await server.client.open_policy_session(request)
            except RollwireError as error:
                self._pool.release(server, 1)
                self._settle(server, error)
            except BaseException:
                self._pool.release(server, 1)
                raise
            else:
                return PolicySession(request.session_id, key, server, answer.base_url, answer.model)
        raise exhausted(Reason.EPISODES_EXHAUSTED, "no rollout server answers now; ask again", RETRY_S)

    async def close(
        self, session: PolicySession, request: rollout_pb2.ClosePolicySessionRequest
    ) -> rollout_pb2.ClosePolicySessionResponse:
        """Closes a session and returns its record; asks again while the server cannot be reached.

        Raises:
            RollwireError: The server refuses, or stays away for longer than the budget.
        """
        request.fence.CopyFrom(self._fence)
        request.session_id = session.session_id
        loop = asyncio.get_running_loop()
        end = loop.time() + self._budgets.lost_s
        while True:
            try:
                return await session.server.client.close_policy_session(request)
            except RollwireError as error:
                if not is_lost(error) or loop.time() > end:
                    raise
                self._pool.report_lost(session.server, error.message)
            await asyncio.sleep(self._budgets.poll_s)

    async def discard(self, server: RolloutServer, session_id: str) -> None:
        """Ends a session without its record, if the server can be reached; its lease ends it otherwise."""
        request = rollout_pb2.ClosePolicySessionRequest(fence=self._fence, session_id=session_id, discard=True)
        try:
            await server.client.close_policy_session(request)
        except RollwireError as error:
            _log.info("session not discarded", session=session_id, error=str(error))

    async def listed(self, server: RolloutServer) -> dict[str, float]:
        """Returns how many seconds each of the run's sessions on a server has been idle. Raises `RollwireError`."""
        answer = await server.client.list_policy_sessions(rollout_pb2.ListPolicySessionsRequest(fence=self._fence))
        return {session.session_id: session.idle.ToNanoseconds() / 1e9 for session in answer.sessions}

    def release(self, session: PolicySession) -> None:
        """Takes back the room of a session that has ended."""
        self._pool.release(session.server, 1)

    async def _acquire(self) -> RolloutServer:
        try:
            async with asyncio.timeout(SERVER_WAIT_S):
                return await self._pool.acquire(1)
        except TimeoutError:
            raise exhausted(
                Reason.EPISODES_EXHAUSTED, "all rollout servers play as many episodes as they may; ask again", RETRY_S
            ) from None

    def _open_request(self, place: Place, lease_s: float) -> tuple[rollout_pb2.OpenPolicySessionRequest, str]:
        plan, key = place.offer.progress.plan, f"rw-{new_secret()}"
        # So that the record of a session fits into one message, even when no prompt extends another.
        most_calls = INTERNAL_MESSAGE_BYTES // (_BYTES_PER_TOKEN * plan.max_episode_tokens)
        request = rollout_pb2.OpenPolicySessionRequest(
            fence=self._fence,
            session_id=new_id("session"),
            key_digest=hashlib.sha256(key.encode()).digest(),
            sampling=plan.sampling,
            sampling_seed=episode_seed(plan.sampling_seed, place.episode_index, place.attempt),
            max_sequence_tokens=plan.max_episode_tokens,
            max_calls=min(max(most_calls, 1), MAX_CALLS),
            lease=duration(lease_s),
            required_version=place.offer.required_version,
            group_id=plan.group_id,
            episode_index=place.episode_index,
            attempt=place.attempt,
            environment_tag=plan.environment_tag,
            environment_seed=plan.environment_seed,
        )
        return request, key

    def _settle(self, server: RolloutServer, error: RollwireError) -> None:
        """Returns when another server may be asked, after the error of one; raises otherwise."""
        if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise exhausted(Reason.EPISODES_EXHAUSTED, error.message, error.retry_after_s or RETRY_S) from error
        if error.reason not in (Reason.NO_WEIGHTS, Reason.WRONG_VERSION) and not is_lost(error):
            raise RunError(
                f"the rollout server at {server.client.target} refused an agent's session: {error}"
            ) from error
        self._pool.report_lost(server, error.message)


def is_lost(error: RollwireError) -> bool:
    """Tells whether an error says that the server cannot be reached."""
    return error.code in (*LOST_CODES, grpc.StatusCode.DEADLINE_EXCEEDED)
