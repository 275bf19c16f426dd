"""Streams of providers without a network: what the server offers is what providers serve, at every moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from rollwire.environment.hosts import Hosts
from rollwire.environment.hub_streams import ProviderStreams
from rollwire.serving.config.sections import ProvidersSection
from rollwire.v1 import environment_pb2 as pb

LIMIT_S = 60.0


async def test_the_tags_of_a_provider_that_is_thrown_out_are_gone_at_once() -> None:
    hosts = Hosts({})
    streams = ProviderStreams(hosts, ProvidersSection(), 5)
    sent: asyncio.Queue[pb.AttachRequest] = asyncio.Queue()

    async def requests() -> AsyncIterator[pb.AttachRequest]:
        while True:
            yield await sent.get()

    description = pb.EnvironmentDescription(tag="Raw", max_turns=9)
    hello = pb.ProviderHello(provider_id="0123456789abcdef", environments=[description], capacity=1)
    sent.put_nowait(pb.AttachRequest(hello=hello))
    stream = streams.attach(requests())
    assert (await anext(stream)).HasField("welcome")
    assert hosts.descriptions() == [description]
    # From here on the stream is asked for nothing, as when its peer does not read.
    sent.put_nowait(pb.AttachRequest())
    async with asyncio.timeout(LIMIT_S):
        while hosts.descriptions():
            await asyncio.sleep(0)
    assert hosts.get("Raw") is None
    await stream.aclose()
