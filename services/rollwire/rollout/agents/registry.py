"""All policy sessions of a server: opened, found by key, closed with their record, ended when no call comes."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from google.protobuf.duration_pb2 import Duration

from rollwire.rollout.agents.plans import SessionPlan, check_close
from rollwire.rollout.agents.session import PolicySession
from rollwire.rollout.agents.trajectory import sequences_and_turns
from rollwire.rollout.episode import Hashes
from rollwire.rollout.groups import EpisodeSlots
from rollwire.rollout.requests import write_sampling
from rollwire.rpc.errors import Reason, not_found, precondition
from rollwire.rpc.expiry import Expiry
from rollwire.v1 import rollout_pb2, trajectory_pb2

REMEMBERED_S: Final = 600.0
"""How long a closed session's answer is kept for repeats."""

MAX_REMEMBERED_BYTES: Final = 512 << 20
"""Memory for the answers of closed sessions; beyond it the oldest are forgotten early."""


@dataclass(frozen=True)
class _Closed:
    """A closed session's answer, which is sent again as it is."""

    run_id: str
    answer: bytes


class PolicySessions:
    """The sessions.

    Args:
        slots: A session takes the place of an episode.
        hashes: Copied into every record.
        limit_s: Calls of one session are answered for so long.
        keep_prefixes: Let the engine keep the prefixes of conversations.
        release: Frees a prefix of the engine.
    """

    def __init__(
        self,
        slots: EpisodeSlots,
        hashes: Hashes,
        limit_s: float,
        *,
        keep_prefixes: bool,
        release: Callable[[str], None],
    ) -> None:
        self._slots = slots
        self._hashes = hashes
        self._limit_s = limit_s
        self._keep_prefixes = keep_prefixes
        self._release = release
        self._sessions: dict[str, PolicySession] = {}
        self._by_key: dict[bytes, PolicySession] = {}
        self._leases = Expiry[str](self._expire)
        self._closed: OrderedDict[str, _Closed] = OrderedDict()
        self._closed_bytes = 0
        self._forgetting = Expiry[str](self._forget)

    def open(self, plan: SessionPlan, may_open: Callable[[], None]) -> None:
        """Opens a session; does nothing if it is open already.

        Args:
            plan: What is asked for.
            may_open: Raises if the server cannot take a new session now.

        Raises:
            RollwireError: RESOURCE_EXHAUSTED / `EPISODES_EXHAUSTED`; FAILED_PRECONDITION / `ALREADY_EXISTS` when
                another session has this identifier or key.
        """
        known = self._sessions.get(plan.session_id)
        if known is not None and known.plan == plan:
            return
        if known is not None or plan.session_id in self._closed or plan.key_digest in self._by_key:
            raise precondition(
                Reason.ALREADY_EXISTS,
                f"session {plan.session_id} or its key exists with other settings, or was closed; take a new one",
                session_id=plan.session_id,
            )
        may_open()
        self._slots.take(1)
        session = PolicySession(plan, _now_s(), self._limit_s, keep_prefixes=self._keep_prefixes)
        self._sessions[plan.session_id] = self._by_key[plan.key_digest] = session
        self.renew(session)

    def find(self, key: str) -> PolicySession | None:
        """Returns the open session of a bearer key."""
        return self._by_key.get(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest())

    def renew(self, session: PolicySession) -> None:
        """Starts a session's lease again; while calls run it does not end."""
        if session.ended.is_set():
            return
        if session.book.running:
            self._leases.discard(session.plan.session_id)
        else:
            self._leases.add(session.plan.session_id, _now_s() + session.plan.lease_s)

    def close(self, request: rollout_pb2.ClosePolicySessionRequest) -> rollout_pb2.ClosePolicySessionResponse:
        """Ends a session and returns its record, or what an earlier close returned.

        Raises:
            RollwireError: NOT_FOUND / `UNKNOWN_SESSION`; INVALID_ARGUMENT, and the session stays open.
        """
        closed = self._closed.get(request.session_id)
        if closed is not None and closed.run_id == request.fence.run_id:
            return rollout_pb2.ClosePolicySessionResponse.FromString(closed.answer)
        session = self._sessions.get(request.session_id)
        if session is None or session.plan.run_id != request.fence.run_id:
            raise not_found(
                Reason.UNKNOWN_SESSION,
                f"there is no session {request.session_id}; it was never opened here, its lease has ended, or it was "
                f"closed more than {REMEMBERED_S:g} s ago",
                session_id=request.session_id,
            )
        if not request.discard:
            check_close(request, {call.call_id for call in session.book.completed})
        answer = rollout_pb2.ClosePolicySessionResponse(calls=len(session.book.completed))
        if answer.calls and not request.discard:
            answer.trajectory.CopyFrom(self._trajectory(session, request))
        self._end(session)
        self._remember(session.plan, answer.SerializeToString())
        return answer

    def listed(self, run_id: str) -> list[rollout_pb2.PolicySession]:
        """Returns the open sessions of a run."""
        now_s = _now_s()
        return [
            rollout_pb2.PolicySession(
                session_id=session.plan.session_id,
                calls=len(session.book.completed),
                idle=_duration(0.0 if session.book.running else now_s - session.touched_s),
            )
            for session in self._sessions.values()
            if session.plan.run_id == run_id
        ]

    def end_all(self) -> None:
        """Ends every session; the server stops."""
        for session in list(self._sessions.values()):
            self._end(session)
        self._leases.clear()
        self._forgetting.clear()

    def _trajectory(
        self, session: PolicySession, request: rollout_pb2.ClosePolicySessionRequest
    ) -> trajectory_pb2.Trajectory:
        plan, calls = session.plan, session.book.completed
        rewards = {call.number: request.call_rewards.get(call.call_id, 0.0) for call in calls}
        rewards[calls[-1].number] += request.reward
        sequences, turns = sequences_and_turns(calls, rewards, truncated=request.truncated)
        duration_s = _now_s() - session.opened_s
        generation_s = min(session.generation_s, duration_s)  # calls may run at the same time
        return trajectory_pb2.Trajectory(
            trajectory_id=f"{plan.group_id}-e{plan.episode_index}-a{plan.attempt}",
            group_id=plan.group_id,
            episode_index=plan.episode_index,
            attempt=plan.attempt,
            environment_tag=plan.environment_tag,
            environment_seed=plan.environment_seed,
            sampling_seed=plan.sampling_seed,
            sequences=sequences,
            turns=turns,
            score=sum(turn.reward for turn in turns),
            metrics=request.metrics,
            end=trajectory_pb2.EPISODE_END_TRUNCATED if request.truncated else trajectory_pb2.EPISODE_END_TERMINATED,
            sampling=write_sampling(plan.sampling),
            tokenizer_hash=self._hashes.tokenizer,
            template_hash=self._hashes.templates,
            duration=_duration(duration_s),
            environment_duration=_duration(duration_s - generation_s),
            generation_duration=_duration(generation_s),
        )

    def _expire(self, session_id: str) -> None:
        self._end(self._sessions[session_id])

    def _end(self, session: PolicySession) -> None:
        """Takes the key away and lets running calls end; each frees the prefix that it uses."""
        del self._sessions[session.plan.session_id], self._by_key[session.plan.key_digest]
        self._leases.discard(session.plan.session_id)
        session.ended.set()
        self._slots.give_back(1)
        for key in session.cache_keys():
            self._release(key)

    def _remember(self, plan: SessionPlan, answer: bytes) -> None:
        self._closed[plan.session_id] = _Closed(plan.run_id, answer)
        self._closed_bytes += len(answer)
        self._forgetting.add(plan.session_id, _now_s() + REMEMBERED_S)
        while self._closed_bytes > MAX_REMEMBERED_BYTES:
            oldest = next(iter(self._closed))
            self._forgetting.discard(oldest)
            self._forget(oldest)

    def _forget(self, session_id: str) -> None:
        self._closed_bytes -= len(self._closed.pop(session_id).answer)


def _now_s() -> float:
    """Returns the time of the event loop, on which leases are counted."""
    return asyncio.get_running_loop().time()


def _duration(seconds: float) -> Duration:
    found = Duration()
    found.FromNanoseconds(int(seconds * 1e9))
    return found
