"""Options of environments are tried before a run begins."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rollwire.client.environment import EnvironmentClient
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.option_check import check_options
from rollwire.environment.service import EnvironmentServer
from rollwire.serving.config.models import RunConfig
from rollwire.serving.server import Binding, serving

Check = Callable[[dict[str, Any]], Any]
LAKE = {"tag": "FrozenLake", "options": {"size": 4}}


@pytest.fixture
async def server() -> AsyncIterator[EnvironmentClient]:
    async with (
        serving(EnvironmentServer(RunConfig()), Binding(), grace_s=1) as running,
        EnvironmentClient(running.address) as client,
    ):
        yield client


def configured(*entries: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate({"environments": entries})


async def test_good_options_leave_no_session(server: EnvironmentClient) -> None:
    await check_options(configured(LAKE), [server])
    assert (await server.list_environments()).open_sessions == 0


@pytest.mark.parametrize("options", [{"sice": 4}, {"size": "large"}, {"size": -1}])
async def test_bad_options_are_named(server: EnvironmentClient, options: dict[str, Any]) -> None:
    with pytest.raises(RunError) as raised:
        await check_options(configured({"tag": "FrozenLake", "options": options}), [server])
    text = str(raised.value)
    assert text.startswith(
        f"environments entry 'FrozenLake' has options that the environment server at {server.target} refuses: "
    )
    assert next(iter(options)) in text and "\n" not in text
    assert (await server.list_environments()).open_sessions == 0


async def test_a_run_with_bad_options_does_not_begin(world: Any) -> None:
    with pytest.raises(RunError, match=r"entry 'Sokoban' has options .* refuses: options.rooms is 3"):
        await world.run("environments=[{tag: FrozenLake}, {tag: Sokoban, options: {rooms: 3}}]")
    assert not world.status.began and world.learner.calls == 0


async def test_other_troubles_are_left_to_the_run(server: EnvironmentClient) -> None:
    entries = ({"tag": "Unknown", "options": {"a": 1}}, {"tag": "Agent", "source": "agent", "options": {"b": 2}}, LAKE)
    async with EnvironmentClient("127.0.0.1:1") as gone:
        await check_options(configured(*entries), [server, gone])
