"""The environment servers that a rollout server knows: as many as it may, and those that are played on stay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from rollwire.rollout.environments import EnvironmentPool
from rollwire.rpc.errors import Reason, RollwireError


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EnvironmentPool]:
    """A pool of at most three servers; nobody listens at their addresses."""
    monkeypatch.setattr("rollwire.rollout.environments._MAX_TARGETS", 3)
    found = EnvironmentPool()
    yield found
    await found.close()


async def test_servers_that_nobody_plays_on_make_room(pool: EnvironmentPool) -> None:
    first, second, third = (pool.server(f"127.0.0.1:{port}") for port in (1, 2, 3))
    first.sessions = 1
    assert pool.server("127.0.0.1:2") is second, "used last"
    pool.server("127.0.0.1:4")
    assert pool.server("127.0.0.1:1") is first and pool.server("127.0.0.1:2") is second
    assert pool.server("127.0.0.1:3") is not third


async def test_servers_that_are_played_on_stay(pool: EnvironmentPool) -> None:
    servers = pool.by_load([f"127.0.0.1:{port}" for port in (1, 2, 3)])
    for server in servers:
        server.sessions = 1
    with pytest.raises(RollwireError, match="plays on 3 environment servers, which is its limit") as caught:
        pool.server("127.0.0.1:4")
    assert (caught.value.code, caught.value.reason) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.SESSIONS_EXHAUSTED,
    )
    servers[0].sessions = 0
    async with servers[0]._asking:
        with pytest.raises(RollwireError):
            pool.server("127.0.0.1:4")
    pool.server("127.0.0.1:4")
    await asyncio.sleep(0)
