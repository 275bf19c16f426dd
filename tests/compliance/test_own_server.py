"""The compliance suite on our own server: a hosted environment, and one that fails when told to."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollwire.compliance import EnvironmentCompliance, FailureCompliance
from rollwire.environment.service import EnvironmentServer
from rollwire.serving.config.models import RunConfig
from rollwire.serving.server import Binding, serving

PLUGINS = Path(__file__).parents[1] / "contract" / "providers" / "plugins"
MOVES = tuple(f"<answer>{move}</answer>" for move in ("Right", "Down", "Left", "Down", "Right", "Up"))


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """A server in a thread of its own, because the suite's tests block theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PLUGINS))
        yield from _serving()
    sys.modules.pop("provider_games", None)


def _serving() -> Iterator[str]:
    found: list[str] = []
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        definitions = {
            "Taxi": {"type": "gymnasium", "options": {"id": "Taxi-v4", "max_turns": 20}},
            "Count": {"type": "provider_games:Counting"},
        }
        config = RunConfig.model_validate({"environment": {"definitions": definitions}})
        async with serving(EnvironmentServer(config), Binding(), grace_s=1) as running:
            found.append(running.address)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)


class TestFrozenLake(EnvironmentCompliance):
    tag = "FrozenLake"
    actions = MOVES


class TestSlipperyLake(EnvironmentCompliance):
    tag = "FrozenLake"
    actions = MOVES
    options: ClassVar[dict[str, Any]] = {"is_slippery": True, "size": 8}


class TestSokoban(EnvironmentCompliance):
    tag = "SimpleSokoban"
    actions = MOVES


class TestGymnasium(EnvironmentCompliance):
    tag = "Taxi"
    actions = ("<answer>1</answer>", "<answer>2</answer>", "<answer>0</answer>")


class TestFailing(FailureCompliance, EnvironmentCompliance):
    tag = "Count"
    actions = ("one", "two")
    failing_action = "raise"
    failure_type = "ZeroDivisionError"
