"""A run whose tag no server offers yet waits for a provider, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rollwire.client import serve_environment_async
from rollwire.coordinator.peers import Peers
from rollwire.coordinator.provider_wait import wait_for_tags
from rollwire.coordinator.status import RunStatus
from rollwire.environment.service import EnvironmentServer
from rollwire.serving.config.models import RunConfig
from rollwire.serving.server import Binding, serving


class Observer:
    def __init__(self) -> None:
        self.notices: list[str] = []
        self.told = asyncio.Event()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        raise AssertionError(step)

    def on_validation(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        raise AssertionError(step)

    def on_notice(self, text: str) -> None:
        self.notices.append(text)
        self.told.set()


class Late:
    """An environment that comes late."""

    max_turns = 1

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "late", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, True, False, {}


def configured(target: str, ready_s: float, tag: str = "Late") -> RunConfig:
    return RunConfig.model_validate(
        {
            "services": {"environment": [target], "rollout": ["127.0.0.1:1"], "learner": ["127.0.0.1:1"]},
            "environments": [{"tag": tag}, {"tag": "FrozenLake"}],
            "timeouts": {"ready_s": ready_s},
        }
    )


async def test_the_provider_comes() -> None:
    async with serving(EnvironmentServer(RunConfig()), Binding(), grace_s=1) as running:
        config = configured(running.address, 120)
        observer, stop = Observer(), asyncio.Event()
        status = RunStatus("run", 1, observer)
        async with Peers(config) as peers, asyncio.timeout(60):
            waiting = asyncio.create_task(wait_for_tags(config, peers, status))
            await observer.told.wait()
            assert (
                f"{running.address} does not offer Late yet: waiting up to timeouts.ready_s=120 s"
                in (observer.notices[0])
            )
            provider = asyncio.create_task(
                serve_environment_async(running.address, {"Late": Late}, stop=stop, drain_timeout_s=0)
            )
            await waiting
            stop.set()
            await provider
    assert len(observer.notices) == 1


async def test_no_provider_comes() -> None:
    async with serving(EnvironmentServer(RunConfig()), Binding(), grace_s=1) as running:
        config = configured(running.address, 0.2)
        observer = Observer()
        async with Peers(config) as peers, asyncio.timeout(60):
            await wait_for_tags(config, peers, RunStatus("run", 1, observer))
    assert len(observer.notices) == 1


async def test_a_misspelt_tag_is_told_at_once() -> None:
    async with serving(EnvironmentServer(RunConfig()), Binding(), grace_s=1) as running:
        config = configured(running.address, 0.2, "frozenLkae")
        observer = Observer()
        async with Peers(config) as peers, asyncio.timeout(60):
            await wait_for_tags(config, peers, RunStatus("run", 1, observer))
    (notice,) = observer.notices
    assert "does not offer frozenLkae (did you mean FrozenLake?) yet: waiting" in notice
