"""The sessions of agents: opened, then closed with a result, closed as failed, or lost: exactly one of these."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.struct_pb2 import Struct

from rollwire.coordinator.agent_desk import AgentDesk, Offer, Place
from rollwire.coordinator.agent_requests import MIN_LEASE_S, check_close, check_open
from rollwire.coordinator.arrivals import Arrival
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.groups import Reason as FailureReason
from rollwire.coordinator.groups import reason_name
from rollwire.coordinator.intake import ProtocolError
from rollwire.coordinator.ledger import Ledger
from rollwire.coordinator.policy_sessions import PolicySession, PolicySessions, is_lost
from rollwire.coordinator.run_gate import RunGate
from rollwire.coordinator.tasks import Pulse
from rollwire.rpc.errors import Reason, RollwireError, exhausted, not_found, precondition
from rollwire.serving.logs import get_logger
from rollwire.v1 import coordinator_pb2, rollout_pb2, trajectory_pb2

PLACE_WAIT_S: Final = 2.0
"""How long an agent waits for an episode before it is told to ask again."""

PLACE_RETRY_S: Final = 0.5
MAX_WAITING: Final = 256
"""Agents that wait at once; more are told to ask again at once, so that other calls are not kept from the server."""

MAX_REMEMBERED: Final = 65_536
"""Ended sessions whose answer is remembered for repeats."""

Answer = coordinator_pb2.CloseAgentSessionResponse | RollwireError
_log = get_logger(__name__)


@dataclass(eq=False)
class AgentSession:
    """An open session.

    Attributes:
        request_id: Key under which it was asked for.
        place: The episode that it plays.
        policy: Its session on a rollout server.
        lease_s: Time without a call after which it ends.
        opened_s: When it was opened, in the event loop's time.
        closing: What closes it, once the agent has asked for that.
    """

    request_id: str
    place: Place
    policy: PolicySession
    lease_s: float
    opened_s: float
    closing: asyncio.Task[coordinator_pb2.CloseAgentSessionResponse] | None = None


class AgentSessions:
    """All sessions of a run.

    Attributes:
        opened: Sessions opened so far.
        asked_s: When an agent last asked for a session, by tag, in the event loop's time.
        settled_s: When the last episode got its result, in the event loop's time; None before.
        changed: Fires when a session or an offer changes.
        failure: What ends the run; None while all is well.

    Args:
        desk: What is offered.
        policy: Sessions on rollout servers.
        ledger: Where trajectories become durable.
        gate: Whether the run takes sessions.
        longest_lease_s: A lease is cut to it, so that an agent that has died holds no group up for longer.
        on_episode: Called for every result.
    """

    def __init__(
        self,
        desk: AgentDesk,
        policy: PolicySessions,
        ledger: Ledger,
        gate: RunGate,
        longest_lease_s: float,
        on_episode: Callable[[], None],
    ) -> None:
        self.opened = 0
        self.asked_s: dict[str, float] = {}
        self.settled_s: float | None = None
        self.changed = Pulse()
        self.failure: RunError | None = None
        self._desk = desk
        self._policy = policy
        self._ledger = ledger
        self._gate = gate
        self._longest_lease_s = max(longest_lease_s, MIN_LEASE_S)
        self._on_episode = on_episode
        self._sessions: dict[str, AgentSession] = {}
        self._opening: dict[str, asyncio.Task[coordinator_pb2.OpenAgentSessionResponse]] = {}
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting = 0

    @property
    def open_sessions(self) -> list[AgentSession]:
        """Sessions that no agent has asked to close."""
        return [session for session in self._sessions.values() if session.closing is None]

    async def open(
        self, request: coordinator_pb2.OpenAgentSessionRequest, options: Struct
    ) -> coordinator_pb2.OpenAgentSessionResponse:
        """Opens a session, or returns the one that was opened for the same request. Raises `RollwireError`."""
        lease_s = min(check_open(request), self._longest_lease_s)
        self._gate.check()
        self.asked_s[request.environment_tag] = asyncio.get_running_loop().time()
        opening = self._opening.get(request.request_id)
        if opening is None:
            opening = self._opening[request.request_id] = self._spawn(self._open(request, options, lease_s))
            opening.add_done_callback(lambda task: self._forget_failed(request.request_id, task))
        return await asyncio.shield(opening)

    async def close(
        self, request: coordinator_pb2.CloseAgentSessionRequest
    ) -> coordinator_pb2.CloseAgentSessionResponse:
        """Closes a session, or returns what the first call was answered. Raises `RollwireError`."""
        check_close(request)
        session = self._sessions.get(request.session_id)
        if session is None:
            return self._answered(request.session_id)
        if session.closing is None:
            session.closing = self._spawn(self._close(session, request))
        return await asyncio.shield(session.closing)

    def lose(self, session: AgentSession, reason: FailureReason.ValueType, message: str, *, discard: bool) -> None:
        """Ends a session without its agent: its episode has failed."""
        self._end(session, _unknown(session.policy.session_id, message))
        if discard:
            self._spawn(self._policy.discard(session.policy.server, session.policy.session_id))
        self._fail_episode(session.place, reason, message)

    def end_offer(self, offer: Offer, reason: FailureReason.ValueType, message: str) -> None:
        """Ends an offer and every session of it; what has no result has failed."""
        self._desk.remove(offer)
        for session in [session for session in self._sessions.values() if session.place.offer is offer]:
            self._end(session, _unknown(session.policy.session_id, message))
            if session.closing is None:
                self._spawn(self._policy.discard(session.policy.server, session.policy.session_id))
        offer.progress.fail_pending(reason, message)

    def fail(self, error: RunError) -> None:
        """Ends the run."""
        self.failure = self.failure or error
        self.changed.fire()

    async def end(self, grace_s: float) -> None:
        """Waits a little for what is being closed and discarded, and cancels the rest."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=grace_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _open(
        self, request: coordinator_pb2.OpenAgentSessionRequest, options: Struct, lease_s: float
    ) -> coordinator_pb2.OpenAgentSessionResponse:
        place = await self._place(request.environment_tag, request.task_name)
        try:
            policy = await self._policy.open(place, lease_s)
        except RunError as error:
            self.fail(error)
            raise precondition(Reason.RUN_ENDED, f"the run has ended: {error}") from error
        except BaseException:
            self._desk.give_back(place)
            self.changed.fire()
            raise
        if not place.offer.active:
            self._policy.release(policy)
            await self._policy.discard(policy.server, policy.session_id)
            raise _nothing_now(request.environment_tag)
        now = asyncio.get_running_loop().time()
        session = AgentSession(request.request_id, place, policy, lease_s, now)
        self._sessions[policy.session_id] = session
        self.opened += 1
        plan = place.offer.progress.plan
        return coordinator_pb2.OpenAgentSessionResponse(
            session_id=policy.session_id,
            base_url=policy.base_url,
            api_key=policy.api_key,
            model=policy.model,
            seed=plan.environment_seed,
            options=options,
            task_name=place.offer.task_name,
            group_id=plan.group_id,
            episode_index=place.episode_index,
            max_tokens=plan.sampling.max_tokens,
            max_sequence_tokens=plan.max_episode_tokens,
        )

    async def _place(self, tag: str, task_name: str) -> Place:
        """Waits a little for an episode. Raises `RollwireError`: `EPISODES_EXHAUSTED` when none comes."""
        loop = asyncio.get_running_loop()
        end = loop.time() + PLACE_WAIT_S
        while (place := self._desk.take(tag, task_name)) is None:
            if self._waiting >= MAX_WAITING or loop.time() >= end:
                raise _nothing_now(tag)
            self._waiting += 1
            try:
                async with asyncio.timeout_at(end):
                    await self.changed.wait()
            except TimeoutError:
                continue
            finally:
                self._waiting -= 1
            self._gate.check()
        return place

    async def _close(
        self, session: AgentSession, request: coordinator_pb2.CloseAgentSessionRequest
    ) -> coordinator_pb2.CloseAgentSessionResponse:
        result, session_id = request.completed, session.policy.session_id
        failed = request.WhichOneof("result") == "failure"
        ask = rollout_pb2.ClosePolicySessionRequest(
            reward=result.reward,
            call_rewards=result.call_rewards,
            metrics=result.metrics,
            truncated=result.truncated,
            discard=failed,
        )
        try:
            record = await self._policy.close(session.policy, ask)
        except RollwireError as error:
            raise self._settle(session, error) from error
        if session_id not in self._sessions:  # its group was given up meanwhile
            return self._answered(session_id)
        if failed or not record.HasField("trajectory"):
            why = request.failure if failed else "it was closed with a reward, but no call completed"
            answer: Answer = coordinator_pb2.CloseAgentSessionResponse(calls=record.calls)
            if not failed:
                answer = precondition(Reason.NO_CALLS, f"session {session_id} has failed: {why}")
            self._end(session, answer)
            self._fail_episode(session.place, trajectory_pb2.FAILURE_REASON_AGENT_FAILED, why or "no reason was given")
            if isinstance(answer, RollwireError):
                raise answer
            return answer
        return await self._complete(session, record)

    async def _complete(
        self, session: AgentSession, record: rollout_pb2.ClosePolicySessionResponse
    ) -> coordinator_pb2.CloseAgentSessionResponse:
        """Makes a session's trajectory durable and counts its episode."""
        trajectory, progress = record.trajectory, session.place.offer.progress
        try:
            progress.check(trajectory)
            if not await self._ledger.add_arrival(Arrival(trajectory, session.place.offer.task_name)):
                raise ProtocolError(f"the trajectory {trajectory.trajectory_id!r} came twice")
        except ProtocolError as error:
            target = session.policy.server.client.target
            self.fail(RunError(f"the rollout server at {target} broke the contract: {error}"))
            raise precondition(Reason.RUN_ENDED, "the run has ended: a rollout server broke the contract") from error
        except RunError as error:
            self.fail(error)
            raise precondition(Reason.RUN_ENDED, f"the run has ended: {error}") from error
        if session.policy.session_id not in self._sessions:
            return self._answered(session.policy.session_id)
        answer = coordinator_pb2.CloseAgentSessionResponse(
            trajectory_id=trajectory.trajectory_id, calls=record.calls, sequences=len(trajectory.sequences)
        )
        self._end(session, answer)
        progress.add(rollout_pb2.RunGroupResponse(trajectory=trajectory))
        self._after_episode(session.place)
        return answer

    def _settle(self, session: AgentSession, error: RollwireError) -> RollwireError:
        """Returns what an agent is answered whose session could not be closed."""
        target = session.policy.server.client.target
        if session.policy.session_id not in self._sessions:
            message = "its group was given up"
        elif error.reason == Reason.UNKNOWN_SESSION:
            message = f"its lease of {session.lease_s:g} s has ended without a call"
            self.lose(session, trajectory_pb2.FAILURE_REASON_AGENT_LOST, message, discard=False)
        elif is_lost(error):
            message = f"the rollout server at {target} was lost ({error.message})"
            self.lose(session, trajectory_pb2.FAILURE_REASON_ROLLOUT_LOST, message, discard=False)
        else:  # such as a reward for a call that there was not: the agent may correct it
            session.closing = None
            return error
        return _unknown(session.policy.session_id, message)

    def _answered(self, session_id: str) -> coordinator_pb2.CloseAgentSessionResponse:
        """Returns, or raises, what ended a session."""
        answer = self._answers.get(session_id)
        if answer is None:
            raise _unknown(session_id, "there is no such session")
        if isinstance(answer, RollwireError):
            raise answer.with_traceback(None)
        return answer

    def _end(self, session: AgentSession, answer: Answer) -> None:
        self._sessions.pop(session.policy.session_id, None)
        self._opening.pop(session.request_id, None)
        self._answers[session.policy.session_id] = answer
        while len(self._answers) > MAX_REMEMBERED:
            self._answers.popitem(last=False)
        self._policy.release(session.policy)

    def _fail_episode(self, place: Place, reason: FailureReason.ValueType, message: str) -> None:
        plan = place.offer.progress.plan
        _log.warning(
            "an agent's episode failed",
            tag=plan.environment_tag,
            group=plan.group_id,
            episode=place.episode_index,
            reason=reason_name(reason),
            cause=message,
        )
        place.offer.progress.fail_episode(place.episode_index, reason, message)
        self._after_episode(place)

    def _after_episode(self, place: Place) -> None:
        self.settled_s = place.offer.quiet_since_s = asyncio.get_running_loop().time()
        self._on_episode()
        self.changed.fire()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs something that goes on when the call that asked for it is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: the caller may be gone

    def _forget_failed(self, request_id: str, task: asyncio.Task[Any]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._opening.get(request_id) is task:
            del self._opening[request_id]


def _nothing_now(tag: str) -> RollwireError:
    return exhausted(
        Reason.EPISODES_EXHAUSTED,
        f"no episode of {tag} is to be played now: all that max_staleness allows are being played; ask again",
        PLACE_RETRY_S,
        environment_tag=tag,
    )


def _unknown(session_id: str, why: str) -> RollwireError:
    return not_found(
        Reason.UNKNOWN_SESSION, f"session {session_id} cannot be closed: {why}; open another one", session_id=session_id
    )
