"""The environment server: `rollwire.v1.EnvironmentService` over sessions and hosts."""

from __future__ import annotations

import asyncio
import time
from asyncio import Future
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from rollwire.environment.calls import REAP_INTERVAL_S, SessionCalls
from rollwire.environment.host import EnvironmentHost
from rollwire.environment.hosts import Hosts
from rollwire.environment.hub_streams import ProviderStreams
from rollwire.environment.isolation.host import IsolatedHost
from rollwire.environment.play import PlayStream
from rollwire.environment.registry import load_registry
from rollwire.rpc.limits import ENVIRONMENT_MESSAGE_BYTES
from rollwire.serving.config.models import RunConfig
from rollwire.serving.logs import get_logger
from rollwire.serving.server import Readiness
from rollwire.v1 import environment_pb2 as pb
from rollwire.v1 import environment_pb2_grpc as pb_grpc

_log = get_logger(__name__)


class EnvironmentServer(pb_grpc.EnvironmentServiceServicer):
    """Serves the environments of a configuration; a `rollwire.serving.server.Service`.

    Attributes:
        calls: The sessions.
    """

    full_name = "rollwire.v1.EnvironmentService"
    message_bytes = ENVIRONMENT_MESSAGE_BYTES

    def __init__(
        self, config: RunConfig, clock: Callable[[], float] = time.monotonic, *, show_output: bool = False
    ) -> None:
        """Loads the environments that the configuration defines.

        Args:
            config: The section `environment` is read.
            clock: Monotonic time in seconds, for leases.
            show_output: Write what environments in processes of their own print to standard error, too.

        Raises:
            ServeError: A definition cannot be used.
        """
        section = config.environment
        registry = load_registry(section, show_output=show_output)
        self._isolated = {
            tag: IsolatedHost(registry.environments[tag], isolation, section.disable_after_failures)
            for tag, isolation in registry.isolations.items()
        }
        in_threads = {
            tag: EnvironmentHost(known, section.disable_after_failures)
            for tag, known in registry.environments.items()
            if tag not in self._isolated
        }
        hosts = Hosts({**in_threads, **self._isolated})
        self.calls = SessionCalls(hosts, section.max_sessions, clock)
        self._providers = ProviderStreams(hosts, section.providers, section.disable_after_failures)
        self._capacity = section.max_sessions
        self._streams: set[PlayStream] = set()
        self._draining = False
        self._background: tuple[asyncio.Task[None], ...] = ()

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer to the server."""
        pb_grpc.add_EnvironmentServiceServicer_to_server(self, server)

    async def start(self, readiness: Readiness) -> None:
        """Starts the reaper of leases and reports readiness."""
        self._providers.start()
        self._background = (
            asyncio.create_task(self._reap_forever()),
            asyncio.create_task(self._drain(readiness.draining)),
        )
        _log.info("environments ready", environment_tags=self.calls.hosts.tags(), session_capacity=self._capacity)
        await readiness.set(True)

    async def close(self) -> None:
        """Ends all sessions and gives their environments a few seconds to close."""
        for task in self._background:
            task.cancel()
        self._providers.close()
        await self.calls.end()
        await asyncio.gather(*(host.end() for host in self._isolated.values()))

    async def ListEnvironments(
        self, request: pb.ListEnvironmentsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListEnvironmentsResponse:
        """Returns the tags that can be opened: disabled ones are left out."""
        return self.calls.list()

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.OpenSessionResponse:
        """Starts a session, or returns the one that the same request started before."""
        answer = self.calls.open(request)
        return await asyncio.shield(answer) if isinstance(answer, Future) else answer

    async def Step(self, request: pb.StepRequest, context: grpc.aio.ServicerContext) -> pb.StepResponse:
        """Plays a turn, or returns the reply of the latest one."""
        answer = self.calls.step(request)
        return await asyncio.shield(answer) if isinstance(answer, Future) else answer

    async def RenewSession(
        self, request: pb.RenewSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.RenewSessionResponse:
        """Renews a lease."""
        return self.calls.renew(request)

    async def Render(self, request: pb.RenderRequest, context: grpc.aio.ServicerContext) -> pb.RenderResponse:
        """Draws the current state."""
        return await asyncio.shield(self.calls.render(request))

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.CloseSessionResponse:
        """Ends a session; an unknown one is no error."""
        return self.calls.close(request)

    async def Play(
        self, requests: AsyncIterator[pb.PlayRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.PlayResponse]:
        """Answers the calls of any number of sessions."""
        stream = PlayStream(self.calls)
        self._streams.add(stream)
        if self._draining:
            stream.drain()
        try:
            async for message in stream.run(requests):
                yield message
        finally:
            self._streams.discard(stream)

    async def Attach(
        self, requests: AsyncIterator[pb.AttachRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.AttachResponse]:
        """Lets a provider serve sessions."""
        async for message in self._providers.attach(requests):
            yield message

    async def _drain(self, draining: asyncio.Event) -> None:
        await draining.wait()
        self._draining = True
        for stream in self._streams:
            stream.drain()
        self._providers.drain()

    async def _reap_forever(self) -> None:
        while True:
            await asyncio.sleep(REAP_INTERVAL_S)
            self.calls.reap()
