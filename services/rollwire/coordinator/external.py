"""Everything that comes to a run from outside: sessions of agents, and pushed trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Final

from rollwire.coordinator.agent_desk import AgentDesk
from rollwire.coordinator.agent_sessions import AgentSessions
from rollwire.coordinator.agent_source import AgentSource
from rollwire.coordinator.agent_watch import AgentWatch
from rollwire.coordinator.budgets import Budgets
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.ledger import Ledger
from rollwire.coordinator.metrics import Metrics
from rollwire.coordinator.peers import Descriptions
from rollwire.coordinator.planner import Planner, options_struct
from rollwire.coordinator.policy_sessions import PolicySessions
from rollwire.coordinator.pushed_checks import Terms
from rollwire.coordinator.pushed_groups import PushedGroups
from rollwire.coordinator.pushed_source import PushedSource
from rollwire.coordinator.rollout_pool import RolloutPool, ServerState
from rollwire.coordinator.run_gate import RunGate
from rollwire.coordinator.sources import GroupSource
from rollwire.coordinator.status import RunStatus
from rollwire.coordinator.submissions import Submissions
from rollwire.coordinator.wait_notice import WaitNotices
from rollwire.rpc.errors import Reason, not_found
from rollwire.serving.config import RunConfig
from rollwire.serving.config.environments import TrainEnvironment
from rollwire.serving.logs import get_logger
from rollwire.v1 import coordinator_pb2, trajectory_pb2

_log = get_logger(__name__)
END_GRACE_S: Final = 5.0
BUFFERED_STEPS: Final = 2
"""Pushed groups of a tag that may wait, in training steps."""


class External:
    """The outside of a run.

    Attributes:
        sources: Sources of groups by tag.

    Args:
        config: The run.
        found: What its servers say about themselves.
        planner: Knows how tokens are drawn.
        pool: The rollout servers.
        ledger: Where trajectories become durable.
        status: State of the run.
        budgets: Bounds of retries.
    """

    def __init__(
        self,
        config: RunConfig,
        found: Descriptions,
        planner: Planner,
        pool: RolloutPool,
        ledger: Ledger,
        status: RunStatus,
        budgets: Budgets,
    ) -> None:
        self._config = config
        self._pool = pool
        self._pause_s = budgets.watch_s
        self._status = status
        self._gate = RunGate()
        self._entries = {entry.tag: entry for entry in config.environments}
        self._terms = {
            tag: Terms(
                sampling=planner.training_sampling(entry),
                max_sequence_tokens=config.rollout.max_episode_tokens,
                vocabulary_size=found.learner.vocabulary_size,
                tokenizer_hash=found.rollouts[0].tokenizer_hash,
                template_hash=found.rollouts[0].template_hash,
            )
            for tag, entry in self._entries.items()
            if entry.source == "pushed"
        }
        staleness, timeout_s = config.max_staleness, config.timeouts.group_s
        fence = trajectory_pb2.Fence(run_id=status.run_id, epoch=status.epoch)
        policy = PolicySessions(pool, fence, budgets)
        self._desk = desk = AgentDesk()
        self._waits = WaitNotices(timeout_s)
        self._sessions = AgentSessions(desk, policy, ledger, self._gate, timeout_s, status.count_episode)
        self._watch = AgentWatch(self._sessions, policy, pool, budgets, status.notice)
        capacity = BUFFERED_STEPS * config.batch.groups_per_step * (staleness + 1)
        groups = PushedGroups(config.batch.episodes_per_group, capacity)
        self._submissions = Submissions(
            groups, self._terms, ledger, self._gate, lambda: status.version, staleness, timeout_s
        )
        self._pushed = PushedSource(groups, self._submissions, ledger, timeout_s, status.count_episode, pool.check)
        agents = AgentSource(desk, self._sessions, ledger, lambda: status.version, staleness, timeout_s, budgets)
        by_kind: Mapping[str, GroupSource] = {"agent": agents, "pushed": self._pushed}
        self.sources = {tag: by_kind[entry.source] for tag, entry in self._entries.items() if entry.source in by_kind}
        # By connection the tag that was pushed last; None where nothing was yet.
        self._pushers: dict[object, str | None] = {}
        self._stack = AsyncExitStack()

    async def begin(self) -> None:
        """Takes over what an earlier incarnation had accepted, and lets agents and pushers in. Raises `RunError`."""
        if self._terms:
            await self._submissions.restore()
        if any(entry.source == "agent" for entry in self._entries.values()):
            watching = asyncio.get_running_loop().create_task(self._watch.run())
            watching.add_done_callback(self._watch_ended)
            self._stack.callback(watching.cancel)
        if self.sources:
            telling = asyncio.get_running_loop().create_task(self._tell_of_waits())
            telling.add_done_callback(self._watch_ended)
            self._stack.callback(telling.cancel)
        self._gate.begin()

    def end(self) -> None:
        """Lets nobody in any more; who waits is told."""
        self._gate.end()
        self._sessions.changed.fire()
        self._submissions.changed.fire()

    async def close(self) -> None:
        """Ends what is left."""
        self.end()
        await self._stack.aclose()
        await self._sessions.end(END_GRACE_S)

    async def open_agent_session(
        self, request: coordinator_pb2.OpenAgentSessionRequest
    ) -> coordinator_pb2.OpenAgentSessionResponse:
        """Opens a session. Raises `RollwireError`."""
        entry = self._entry(request.environment_tag, "agent")
        self._waits.asked(entry.tag, asyncio.get_running_loop().time())
        return await self._sessions.open(request, options_struct(entry.options))

    async def close_agent_session(
        self, request: coordinator_pb2.CloseAgentSessionRequest
    ) -> coordinator_pb2.CloseAgentSessionResponse:
        """Closes a session. Raises `RollwireError`."""
        return await self._sessions.close(request)

    async def submission_terms(self, tag: str) -> coordinator_pb2.GetSubmissionTermsResponse:
        """Returns what trajectories pushed under a tag must look like. Raises `RollwireError`."""
        entry = self._entry(tag, "pushed")
        self._gate.check()
        await self._submissions.clear_out()
        terms, servers = self._terms[tag], self._pool.servers
        pushers = sum(last in (tag, None) for last in self._pushers.values())
        return coordinator_pb2.GetSubmissionTermsResponse(
            episodes_per_group=self._config.batch.episodes_per_group,
            sampling=terms.sampling,
            max_sequence_tokens=terms.max_sequence_tokens,
            tokenizer_hash=terms.tokenizer_hash,
            template_hash=terms.template_hash,
            version=self._status.version,
            max_staleness=self._config.max_staleness,
            rollout_targets=[server.client.target for server in servers if server.state is ServerState.READY],
            groups_wanted=self._pushed.wanted(tag, pushers),
            options=options_struct(entry.options),
        )

    async def submit(
        self, requests: AsyncIterator[coordinator_pb2.SubmitTrajectoriesRequest]
    ) -> AsyncIterator[coordinator_pb2.SubmitTrajectoriesResponse]:
        """Answers each trajectory in turn. Raises `RollwireError` when the run has ended."""
        self._gate.check()

        async def read() -> coordinator_pb2.SubmitTrajectoriesRequest | None:
            return await anext(requests, None)

        loop = asyncio.get_running_loop()
        ended = loop.create_task(self._gate.ended.wait())
        self._pushers[ended] = None
        try:
            while True:
                reading = loop.create_task(read())
                await asyncio.wait((reading, ended), return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    reading.cancel()
                    self._gate.check()
                request = await reading
                if request is None:
                    return
                if request.trajectory.environment_tag in self._terms:
                    self._waits.asked(request.trajectory.environment_tag, loop.time())
                    self._pushers[ended] = request.trajectory.environment_tag
                yield await self._submissions.submit(request.trajectory)
        finally:
            ended.cancel()
            del self._pushers[ended]

    def metrics(self) -> Metrics:
        """Returns what came from outside so far; nothing for a run that takes nothing from there."""
        found: Metrics = {}
        if len(self._terms) < len(self.sources):
            found["agents/sessions"] = float(self._sessions.opened)
            found["agents/open_sessions"] = float(len(self._sessions.open_sessions))
        if self._terms:
            for name in ("accepted", "duplicate", "stale", "rejected", "groups_stale", "groups_incomplete"):
                found[f"pushed/{name}"] = float(self._submissions.counts[name])
        return found

    async def _tell_of_waits(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._pause_s)
            for tag in self.sources:
                entry = self._entries[tag]
                agents = entry.source == "agent"
                waiting = self._desk.waits(tag) if agents else self._pushed.wanted(tag) > 0
                text = self._waits.look(tag, entry.source, loop.time(), self._status.address, waiting=waiting)
                if text:
                    self._status.notice(text)

    def _watch_ended(self, watching: asyncio.Task[None]) -> None:
        """Ends the run when nobody would find agents that vanish any more."""
        error = None if watching.cancelled() else watching.exception()
        if error is not None:
            _log.error("the watch over agents and pushers failed", exc_info=error)
            self._sessions.fail(RunError(f"what comes from outside cannot be watched: {type(error).__name__}: {error}"))

    def _entry(self, tag: str, source: str) -> TrainEnvironment:
        entry = self._entries.get(tag)
        if entry is None or entry.source != source:
            known = ", ".join(sorted(tag for tag, entry in self._entries.items() if entry.source == source))
            raise not_found(
                Reason.UNKNOWN_ENVIRONMENT,
                f"environment_tag is {tag[:100]!r}, but the run has no such entry with source {source}; "
                f"it has {known or 'none'}",
                environment_tag=tag[:100],
            )
        return entry
