"""Waiting for servers: people learn which ones are missed and why, before the wait is over."""

from __future__ import annotations

import pytest

from rollwire.coordinator import peers
from rollwire.coordinator.errors import RunError
from rollwire.environment.service import EnvironmentServer
from rollwire.serving.config import RunConfig
from rollwire.serving.server import Binding, serving


async def test_servers_that_are_missed_are_named_while_the_run_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "NOTICE_S", 0.1)
    notices: list[str] = []
    async with serving(EnvironmentServer(RunConfig()), Binding(), grace_s=1) as running:
        here = running.address
        services = {"environment": [here], "rollout": [here], "learner": ["127.0.0.1:9"]}
        async with peers.Peers(RunConfig.model_validate({"services": services})) as found:
            with pytest.raises(RunError) as caught:
                await found.wait_ready(0.5, notices.append)

    swapped = f"rollout server at {here} (something answers there, but it is no rollout server)"
    assert swapped in str(caught.value) and "learner server at 127.0.0.1:9 (" in str(caught.value)
    assert "environment server" not in str(caught.value)
    assert f"waiting for the {swapped}, up to timeouts.ready_s=0.5 s" in notices
    assert any(notice.startswith("waiting for the learner server at 127.0.0.1:9 (") for notice in notices)
    assert len(notices) == 2
