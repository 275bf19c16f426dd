"""A real environment server on a loopback port, and providers that attach to it from the same process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollwire.client import serve_environment_async
from rollwire.client.environment import EnvironmentClient
from rollwire.environment.service import EnvironmentServer
from rollwire.rpc.ids import new_id
from rollwire.serving.config.models import RunConfig
from rollwire.serving.server import Binding, serving
from rollwire.v1 import environment_pb2 as pb

LIMIT_S = 60.0
Serve = Callable[..., AbstractAsyncContextManager[EnvironmentClient]]
Provide = Callable[..., AbstractAsyncContextManager[asyncio.Event]]


async def until(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.02)


async def offered(client: EnvironmentClient, *tags: str) -> None:
    """Waits until the server offers the tags."""

    async def all_there() -> bool:
        listed = {entry.tag for entry in (await client.list_environments()).environments}
        return set(tags) <= listed

    await until(all_there)


async def gone(client: EnvironmentClient, tag: str) -> None:
    """Waits until the server offers the tag no longer."""

    async def away() -> bool:
        return tag not in {entry.tag for entry in (await client.list_environments()).environments}

    await until(away)


def opening(tag: str, seed: int = 1, **options: Any) -> pb.OpenSessionRequest:
    request = pb.OpenSessionRequest(request_id=new_id("test"), environment_tag=tag, seed=seed)
    if options:
        request.options.update(options)
    return request


@pytest.fixture
def games(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The environments that providers of these tests serve."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "plugins"))
    import provider_games  # type: ignore[import-not-found]

    provider_games.log.clear()
    provider_games.release.clear()
    yield provider_games
    provider_games.release.set()
    del sys.modules["provider_games"]


@pytest.fixture
def serve() -> Serve:
    """Starts a server with settings of the section `environment.providers`, and gives a client of it."""

    @asynccontextmanager
    async def start(**providers: Any) -> AsyncIterator[EnvironmentClient]:
        providers = {"lease_s": 5, "step_timeout_s": 10, **providers}
        config = RunConfig.model_validate({"environment": {"providers": providers}})
        async with (
            serving(EnvironmentServer(config), Binding(), grace_s=1) as running,
            EnvironmentClient(running.address) as client,
        ):
            yield client

    return start


@pytest.fixture
def provide() -> Provide:
    """Serves environments to a target while the context is open; gives the event that stops the provider."""

    @asynccontextmanager
    async def start(target: str, environments: Any, **settings: Any) -> AsyncIterator[asyncio.Event]:
        stop = asyncio.Event()
        settings = {"drain_timeout_s": 0, **settings}
        task = asyncio.create_task(serve_environment_async(target, environments, stop=stop, **settings))
        try:
            yield stop
        finally:
            stop.set()
            async with asyncio.timeout(LIMIT_S):
                await task

    return start
