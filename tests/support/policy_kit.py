"""The part of a small rollout server that keeps the sessions of agents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from rollwire.rpc.errors import Reason, exhausted, invalid_field, not_found, precondition
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2


class PolicySessionsFake:
    """Keeps sessions; a test counts calls with `call`. `open_fault` and `close_fault` may raise."""

    version: weights_pb2.WeightVersion
    capacity: int
    in_flight: int
    plays_with: Callable[[], int]
    _trajectory: Callable[[Any, int, float], trajectory_pb2.Trajectory]

    def __init__(self) -> None:
        self.sessions: dict[str, rollout_pb2.OpenPolicySessionRequest] = {}
        self.opened: list[rollout_pb2.OpenPolicySessionRequest] = []
        self.drawn_at: dict[str, int] = {}
        self.calls: Counter[str] = Counter()
        self.records: dict[str, rollout_pb2.ClosePolicySessionResponse] = {}
        self.discarded: list[str] = []
        self.idle_s: dict[str, float] = {}
        self.open_fault: Callable[[], None] = lambda: None
        self.close_fault: Callable[[], None] = lambda: None
        self.base_url = "http://127.0.0.1:1/v1"
        self.spoil: Callable[[trajectory_pb2.Trajectory], None] = lambda trajectory: None

    def call(self, session_id: str) -> str:
        """The agent calls the policy; returns the id of the answer."""
        self.drawn_at.setdefault(session_id, self.plays_with())
        self.calls[session_id] += 1
        return f"{session_id}-{self.calls[session_id]}"

    def forget(self, session_id: str) -> None:
        """The lease of a session ends."""
        del self.sessions[session_id]
        self.in_flight -= 1

    async def OpenPolicySession(
        self, request: rollout_pb2.OpenPolicySessionRequest, context: Any
    ) -> rollout_pb2.OpenPolicySessionResponse:
        self.open_fault()
        assert len(request.key_digest) == 32 and request.max_calls >= 1 and request.fence.epoch >= 1
        if request.HasField("required_version") and request.required_version != self.version:
            raise precondition(Reason.WRONG_VERSION, "another version is active")
        if self.in_flight >= self.capacity:
            raise exhausted(Reason.EPISODES_EXHAUSTED, "full", 0.01)
        self.sessions[request.session_id] = request
        self.opened.append(request)
        self.in_flight += 1
        return rollout_pb2.OpenPolicySessionResponse(base_url=self.base_url, model="tiny")

    async def ClosePolicySession(
        self, request: rollout_pb2.ClosePolicySessionRequest, context: Any
    ) -> rollout_pb2.ClosePolicySessionResponse:
        self.close_fault()
        known = self.records.get(request.session_id)
        if known is not None:
            return known
        session = self.sessions.get(request.session_id)
        if session is None:
            raise not_found(Reason.UNKNOWN_SESSION, "no such session")
        calls = self.calls[request.session_id]
        for call in request.call_rewards:
            if call not in {f"{request.session_id}-{number}" for number in range(1, calls + 1)}:
                raise invalid_field(f"call_rewards[{call}]", call, "the id of a call")
        self.forget(request.session_id)
        record = rollout_pb2.ClosePolicySessionResponse(calls=calls)
        if request.discard:
            self.discarded.append(request.session_id)
        elif calls:
            score = request.reward + sum(request.call_rewards.values())
            trajectory = self._trajectory(session, session.episode_index, score)
            trajectory.trajectory_id = f"{request.session_id}-t"
            trajectory.metrics.clear()
            trajectory.metrics.update(request.metrics)
            trajectory.sequences[0].version_spans[0].version.step = self.drawn_at[request.session_id]
            self.spoil(trajectory)
            record.trajectory.CopyFrom(trajectory)
        self.records[request.session_id] = record
        return record

    async def ListPolicySessions(
        self, request: rollout_pb2.ListPolicySessionsRequest, context: Any
    ) -> rollout_pb2.ListPolicySessionsResponse:
        answer = rollout_pb2.ListPolicySessionsResponse()
        for name in self.sessions:
            session = answer.sessions.add(session_id=name, calls=self.calls[name])
            session.idle.FromNanoseconds(int(self.idle_s.get(name, 0.0) * 1e9))
        return answer
