"""Finds the sessions that nobody will close: their lease has ended, their time is up, or their server was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollwire.coordinator.agent_quiet import QuietNotice, QuietSession
from rollwire.coordinator.agent_sessions import AgentSession, AgentSessions
from rollwire.coordinator.budgets import Budgets
from rollwire.coordinator.policy_sessions import PolicySessions, is_lost
from rollwire.coordinator.rollout_pool import RolloutPool, RolloutServer, ServerState
from rollwire.rpc.errors import RollwireError
from rollwire.serving.logs import get_logger
from rollwire.v1 import trajectory_pb2

_log = get_logger(__name__)


class AgentWatch:
    """Looks at the sessions of agents again and again.

    Args:
        sessions: The sessions.
        policy: Asks rollout servers.
        pool: The rollout servers.
        budgets: Bounds of retries.
        notice: Tells people about sessions in which nothing happens.
    """

    def __init__(
        self,
        sessions: AgentSessions,
        policy: PolicySessions,
        pool: RolloutPool,
        budgets: Budgets,
        notice: Callable[[str], None],
    ) -> None:
        self._sessions = sessions
        self._policy = policy
        self._pool = pool
        self._budgets = budgets
        self._notice = notice
        self._quiet = QuietNotice()

    async def run(self) -> None:
        """Watches until it is cancelled."""
        await self._sweep()
        while True:
            await asyncio.sleep(self._budgets.watch_s)
            idle: list[QuietSession] = []
            for server in self._pool.servers:
                sessions = [session for session in self._sessions.open_sessions if session.policy.server is server]
                if sessions:
                    idle += await self._look(server, sessions)
            text = self._quiet.look(asyncio.get_running_loop().time(), self._sessions.settled_s, idle)
            if text:
                self._notice(text)

    async def _sweep(self) -> None:
        """Ends the sessions of an earlier incarnation of the coordinator, which nobody can close any more."""
        for server in self._pool.servers:
            try:
                left = await self._policy.listed(server)
            except RollwireError as error:
                _log.info("old sessions not looked for", server=server.client.target, error=str(error))
                continue
            for session_id in left.keys() - {session.policy.session_id for session in self._sessions.open_sessions}:
                await self._policy.discard(server, session_id)

    async def _look(self, server: RolloutServer, sessions: list[AgentSession]) -> list[QuietSession]:
        """Compares the sessions that the coordinator believes to be open with those that are; returns the latter."""
        loop = asyncio.get_running_loop()
        try:
            listed = await self._policy.listed(server)
        except RollwireError as error:
            if is_lost(error):
                self._pool.report_lost(server, error.message)
            if server.state is ServerState.GONE:
                for session in self._still_open(sessions):
                    self._lose_server(session)
            return []
        found = []
        for session in self._still_open(sessions):
            age_s, limit_s = loop.time() - session.opened_s, session.place.offer.progress.plan.episode_timeout_s
            if session.policy.session_id not in listed:
                if age_s < session.lease_s:  # no lease can have ended: the server forgot it
                    self._lose_server(session)
                else:
                    message = f"its lease of {session.lease_s:g} s has ended without a call"
                    self._sessions.lose(session, trajectory_pb2.FAILURE_REASON_AGENT_LOST, message, discard=False)
            elif age_s > limit_s:
                message = f"it lasted longer than rollout.episode_timeout_s={limit_s:g} s"
                self._sessions.lose(session, trajectory_pb2.FAILURE_REASON_DEADLINE_EXCEEDED, message, discard=True)
            else:
                tag = session.place.offer.progress.plan.environment_tag
                found.append(QuietSession(tag, listed[session.policy.session_id], session.lease_s))
        return found

    def _still_open(self, sessions: list[AgentSession]) -> list[AgentSession]:
        now_open = set(self._sessions.open_sessions)
        return [session for session in sessions if session in now_open]

    def _lose_server(self, session: AgentSession) -> None:
        message = f"the rollout server at {session.policy.server.client.target} was lost, and the session with it"
        self._sessions.lose(session, trajectory_pb2.FAILURE_REASON_ROLLOUT_LOST, message, discard=False)
