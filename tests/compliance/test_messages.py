"""A failed test of the suite shows its author the values that differ."""

from __future__ import annotations

import pytest

from rollwire.client.environment import EnvironmentClient
from rollwire.compliance import EnvironmentCompliance
from rollwire.compliance.game import check_start
from rollwire.v1 import environment_pb2 as pb


def test_a_value_out_of_range_is_shown() -> None:
    with pytest.raises(AssertionError, match=r"assert 0 >= 1"):
        check_start(pb.OpenSessionResponse(session_id="one"))


def test_the_turn_that_differs_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    async def start(self: EnvironmentClient, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        found = pb.OpenSessionResponse(session_id="one", max_turns=3)
        found.lease.FromSeconds(60)
        return found

    async def step(self: EnvironmentClient, session_id: str, turn: int, action: str) -> pb.StepResponse:
        nonlocal count
        count += 1
        return pb.StepResponse(observation=f"view {count if turn == 1 else 0}", truncated=turn == 2)

    async def close(self: EnvironmentClient, session_id: str) -> None:
        """Nothing is open."""

    monkeypatch.setattr(EnvironmentClient, "open_session", start)
    monkeypatch.setattr(EnvironmentClient, "step", step)
    monkeypatch.setattr(EnvironmentClient, "close_session", close)

    class Suite(EnvironmentCompliance):
        tag = "Any"
        actions = ("a",)

    with pytest.raises(AssertionError) as found:
        Suite().test_the_same_seed_gives_the_same_episode("127.0.0.1:1")
    assert "seed 0" in str(found.value)
    assert "'view 2'" in str(found.value) and "'view 5'" in str(found.value)
