"""Both ends of a connection must agree on pings: a server closes a connection whose pings it finds too frequent."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from rollwire.environment.service import EnvironmentServer
from rollwire.rpc import channel as channels
from rollwire.rpc import limits
from rollwire.rpc.limits import KEEPALIVE_MIN_INTERVAL_S, KEEPALIVE_TIME_S
from rollwire.serving.config import RunConfig
from rollwire.serving.server import Binding, serving


async def test_an_idle_connection_that_pings_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KEEPALIVE_MIN_INTERVAL_S < KEEPALIVE_TIME_S
    # The same settings, thirty times as fast: the third ping without a call in between would end the connection.
    monkeypatch.setattr(limits, "KEEPALIVE_TIME_S", 1)
    monkeypatch.setattr(limits, "KEEPALIVE_MIN_INTERVAL_S", 0.5)
    scaled = limits.server_options
    monkeypatch.setattr(
        "rollwire.serving.server.server_options", lambda size: [(name, int(value)) for name, value in scaled(size)]
    )
    async with serving(EnvironmentServer(RunConfig()), Binding()) as running:
        channel = channels.open_environment_channel(running.address)
        await asyncio.wait_for(channel.channel_ready(), 10)
        for _ in range(50):
            await asyncio.sleep(0.1)
            assert channel.get_state() is grpc.ChannelConnectivity.READY
        await channel.close()
