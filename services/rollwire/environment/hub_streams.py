"""The hub on the network: one stream per provider in, its calls out, and the clock that ends what takes too long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

from rollwire.environment.hosts import Hosts
from rollwire.environment.hub import Hub, ProtocolError, broken_contract, provider_replaced
from rollwire.environment.hub_host import ProvidedTag
from rollwire.environment.hub_parts import Provider
from rollwire.rpc.errors import RollwireError, invalid_field
from rollwire.rpc.limits import MIB
from rollwire.serving.config.sections import ProvidersSection
from rollwire.serving.logs import get_logger
from rollwire.v1 import environment_pb2 as pb

_log = get_logger(__name__)
TICK_S: Final = 0.1
_HELLO_TIMEOUT_S: Final = 20.0
_MESSAGE_BYTES: Final = MIB
"""Calls that wait together share a message up to about this size; one call has at most as much and a little."""


@dataclass(eq=False)
class _Stream:
    """One stream of one provider.

    Attributes:
        task: The handler of the stream.
        wake: Set when there may be something to send.
        error: Ends the stream.
        sending_since_s: When the message that is being written was handed over; None between messages.
        announce_drain: The provider must be told that the server is shutting down.
        ended: The provider has sent its last message.
    """

    task: asyncio.Task[object] | None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    error: RollwireError | None = None
    sending_since_s: float | None = None
    announce_drain: bool = False
    ended: bool = False

    def end(self, error: RollwireError | None = None) -> None:
        """Ends the stream, with an error or without."""
        self.error = self.error or error
        self.ended = True
        self.wake.set()


class ProviderStreams:
    """Serves `Attach`, and offers the tags of providers while they are here.

    Args:
        hosts: Where tags of providers are offered; those in it already are the server's own.
        section: Limits.
        disable_after_failures: Episodes of a tag that fail in a row until it is disabled.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        hosts: Hosts,
        section: ProvidersSection,
        disable_after_failures: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hosts = hosts
        self._section = section
        self._clock = clock
        self._hub = Hub(hosts.tags(), section.max_providers, section.lease_s, disable_after_failures, clock)
        self._streams: dict[str, _Stream] = {}
        self._offered: set[str] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._draining = False

    def start(self) -> None:
        """Starts the clock."""
        self._ticker = asyncio.create_task(self._tick_forever())

    def drain(self) -> None:
        """Tells all providers that the server is shutting down; streams end when their calls are answered."""
        self._draining = True
        for stream in self._streams.values():
            stream.announce_drain = True
            stream.wake.set()

    def close(self) -> None:
        """Stops the clock and gives up all providers."""
        if self._ticker is not None:
            self._ticker.cancel()
        for provider in list(self._hub.providers.values()):
            self._hub.evict(provider, "the server has stopped")
        self._sync_tags()
        for stream in self._streams.values():
            stream.end()

    async def attach(self, requests: AsyncIterator[pb.AttachRequest]) -> AsyncIterator[pb.AttachResponse]:
        """Serves one stream of a provider. Raises `RollwireError`."""
        provider = self._hub.attach(await _hello(requests))
        number = provider.stream
        stream = _Stream(asyncio.current_task(), announce_drain=self._draining)
        replaced = self._streams.get(provider.provider_id)
        if replaced is not None:
            replaced.end(provider_replaced())
        self._streams[provider.provider_id] = stream
        self._sync_tags()
        _log.info(
            "provider attached",
            program=provider.program,
            environment_tags=list(provider.descriptions),
            capacity=provider.capacity,
            sessions=len(provider.seats),
        )
        reader = asyncio.create_task(self._read(requests, provider, number, stream))
        try:
            welcome = pb.ProviderWelcome()
            welcome.lease.FromNanoseconds(int(self._section.lease_s * 1e9))
            yield pb.AttachResponse(welcome=welcome)
            async for message in self._outgoing(provider, number, stream):
                stream.sending_since_s = self._clock()
                yield message
                stream.sending_since_s = None
            if stream.error is not None:
                raise stream.error
        finally:
            reader.cancel()
            if self._streams.get(provider.provider_id) is stream:
                del self._streams[provider.provider_id]
            self._hub.cut(provider, number)
            self._sync_tags()
            _log.info("provider's stream ended", program=provider.program, sessions=len(provider.seats))

    async def _outgoing(self, provider: Provider, number: int, stream: _Stream) -> AsyncIterator[pb.AttachResponse]:
        """Yields what the stream has to send, until it ends."""
        stream.wake.set()
        while True:
            await stream.wake.wait()
            stream.wake.clear()
            if stream.announce_drain:
                stream.announce_drain = False
                yield pb.AttachResponse(drain=pb.ProviderDrain())
            while not stream.ended and (calls := self._hub.take(provider, number, _MESSAGE_BYTES)):
                yield pb.AttachResponse(calls=pb.ProviderCalls(calls=calls))
            # A server that drains refuses all calls, so that no session can be played on.
            if stream.ended or (self._draining and not provider.unanswered):
                return

    async def _read(
        self, requests: AsyncIterator[pb.AttachRequest], provider: Provider, number: int, stream: _Stream
    ) -> None:
        """Takes what the provider sends, until it ends the stream or breaks the contract."""
        try:
            async for request in requests:
                if provider.stream != number or stream.ended:
                    return
                self._take_in(request, provider)
                if provider.outbox or self._draining:
                    stream.wake.set()
        except ProtocolError as error:
            _log.warning("provider thrown out", program=provider.program, cause=str(error))
            self._hub.evict(provider, str(error))
            self._sync_tags()  # not left to the end of the stream, which may wait for its peer
            stream.end(broken_contract(error))
        except RollwireError as error:
            stream.end(error)
        else:
            stream.end()

    def _take_in(self, request: pb.AttachRequest, provider: Provider) -> None:
        kind = request.WhichOneof("message")
        if kind == "replies":
            for reply in request.replies.replies:
                self._hub.reply(provider, reply)
        elif kind == "capacity":
            self._hub.set_capacity(provider, request.capacity.capacity)
        elif kind == "drain":
            self._hub.drain(provider)
            _log.info("provider drains", program=provider.program, sessions=len(provider.seats))
        else:
            raise ProtocolError("a second hello" if kind == "hello" else "an empty message")

    def _wake(self, provider: Provider) -> None:
        stream = self._streams.get(provider.provider_id)
        if stream is not None:
            stream.wake.set()

    def _sync_tags(self) -> None:
        """Offers exactly the tags that providers serve."""
        present = set(self._hub.tags)
        for tag in present - self._offered:
            self._hosts.add(tag, ProvidedTag(self._hub, tag, self._section.step_timeout_s, self._wake))
        for tag in self._offered - present:
            self._hosts.remove(tag)
        if present != self._offered:
            _log.info("tags of providers", environment_tags=sorted(present))
        self._offered = present

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._hub.tick()
            self._sync_tags()
            now_s = self._clock()
            for stream in self._streams.values():
                since_s = stream.sending_since_s
                if since_s is not None and now_s - since_s > self._section.lease_s and stream.task is not None:
                    _log.warning("a provider does not read its stream; it is cut")
                    stream.task.cancel()


async def _hello(requests: AsyncIterator[pb.AttachRequest]) -> pb.ProviderHello:
    """Returns the first message of a stream. Raises `RollwireError`."""
    try:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            first = await anext(aiter(requests), None)
    except TimeoutError:
        first = None
    if first is None or first.WhichOneof("message") != "hello":
        raise invalid_field("message", first and first.WhichOneof("message"), "hello, as the first message of a stream")
    return first.hello
