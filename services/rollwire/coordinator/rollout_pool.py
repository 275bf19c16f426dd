"""The rollout servers of a run: who is free, who serves which version, who was lost and is being brought back.

    READY ── transport error, or it lost its weights ──► LOST ── answers again and holds the version ──► READY
                                                          └── stays away longer than the budget ──► GONE

Episodes are only given to servers that are READY, that is, that hold the version pushed last. The run goes on while one
server is READY or may come back; when all are GONE it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from rollwire.client.rollout import RolloutClient
from rollwire.coordinator.budgets import Budgets
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.fan_out import FanOut
from rollwire.coordinator.ledger_schema import VersionRecord
from rollwire.coordinator.tasks import Pulse, run_all
from rollwire.coordinator.weight_check import WeightVerifier
from rollwire.coordinator.weight_push import RelayError, ServerLostError, UnknownVersionError, WeightPusher
from rollwire.v1 import weights_pb2


class ServerState(Enum):
    """State of one rollout server."""

    READY = "ready"
    LOST = "lost"
    GONE = "gone"


@dataclass
class RolloutServer:
    """One rollout server as the pool sees it.

    Attributes:
        client: Its client.
        capacity: Episodes that it runs at once.
        in_flight: Episodes given to it that have no result yet.
        state: State.
        trouble: What was seen when it was lost.
        verified: Its engine was seen to hold what it was sent, since it was last started or lost.
    """

    client: RolloutClient
    capacity: int
    in_flight: int = 0
    state: ServerState = ServerState.READY
    trouble: str = ""
    verified: bool = False


@dataclass(frozen=True)
class PushReport:
    """What bringing a version to all servers took.

    Attributes:
        seconds: Wall time.
        received_bytes: Payload, summed over the servers.
        pause_s: Longest time during which a server admitted no generation.
    """

    seconds: float
    received_bytes: int
    pause_s: float


class RolloutPool:
    """All rollout servers of a run.

    Args:
        clients: Clients.
        capacities: Episodes that each server runs at once.
        pusher: Brings a version to one server.
        verifier: Checks a server that got its first version.
        budgets: Bounds of retries.
        on_activated: Called after each activation, such as to record it.
        notice: Tells people about servers that are lost or back.
    """

    def __init__(
        self,
        clients: Sequence[RolloutClient],
        capacities: Sequence[int],
        pusher: WeightPusher,
        verifier: WeightVerifier,
        budgets: Budgets,
        on_activated: Callable[[VersionRecord], Awaitable[None]],
        notice: Callable[[str], None],
    ) -> None:
        self.servers = [RolloutServer(client, capacity) for client, capacity in zip(clients, capacities, strict=True)]
        self._pusher = pusher
        self._verifier = verifier
        self._budgets = budgets
        self._on_activated = on_activated
        self._notice = notice
        self._version = weights_pb2.WeightVersion()
        self._digest = b""
        self._changed = Pulse()
        self._fetched = Pulse()
        self._recoveries: set[asyncio.Task[None]] = set()
        self._fatal: Exception | None = None

    async def push(self, version: weights_pb2.WeightVersion, digest: bytes) -> PushReport:
        """Brings a version to all servers, the first from the learner and the others from those that have it.

        A server that cannot be reached is lost, the others go on.

        Args:
            version: Version that the learner published.
            digest: Its digest as the learner states it; every server must compute the same.

        Raises:
            RunError: A server refused the version or holds other weights than the learner after it.
        """
        started = time.monotonic()
        self._version, self._digest = version, digest
        ready = [server for server in self.servers if server.state is ServerState.READY]
        fan_out = FanOut(self._pusher.learner_target)
        records = [record for record in await run_all(self._activate(server, fan_out) for server in ready) if record]
        return PushReport(
            seconds=time.monotonic() - started,
            received_bytes=sum(record.received_bytes for record in records),
            pause_s=max((record.pause_s for record in records), default=0.0),
        )

    async def acquire(self, episodes: int, avoid: RolloutServer | None = None) -> RolloutServer:
        """Waits for a server with room and gives it the episodes; `release` must follow.

        Args:
            episodes: Number of episodes, at most the capacity of every server.
            avoid: Server to prefer others to, because the last attempt there failed.

        Raises:
            RunError: All servers are gone.
        """
        while True:
            self.check()
            free = [
                server
                for server in self.servers
                if server.state is ServerState.READY and server.in_flight + episodes <= server.capacity
            ]
            if free:
                server = min(free, key=lambda server: (server is avoid, server.in_flight))
                server.in_flight += episodes
                return server
            await self._changed.wait()

    def check(self) -> None:
        """Raises `RunError` when all servers are gone, or one cannot be brought the present version."""
        if self._fatal is not None:
            raise self._fatal
        if all(server.state is ServerState.GONE for server in self.servers):
            raise RunError(self._gone_text())

    def release(self, server: RolloutServer, episodes: int) -> None:
        """Takes back the room of episodes that have results."""
        server.in_flight -= episodes
        self._changed.fire()

    def report_lost(self, server: RolloutServer, trouble: str) -> None:
        """Notes that a server does not answer or lost its weights, and starts to bring it back."""
        if server.state is not ServerState.READY:
            return
        server.state, server.trouble, server.verified = ServerState.LOST, trouble, False
        limit = f"{self._budgets.lost_s:g} s"
        self._notice(f"rollout server at {server.client.target} was lost ({trouble}); waiting up to {limit} for it")
        task = asyncio.get_running_loop().create_task(self._recover(server))
        self._recoveries.add(task)
        task.add_done_callback(self._recoveries.discard)

    async def close(self) -> None:
        """Ends all attempts to bring servers back."""
        for task in list(self._recoveries):
            task.cancel()
        await asyncio.gather(*self._recoveries, return_exceptions=True)

    async def _activate(self, server: RolloutServer, fan_out: FanOut) -> VersionRecord | None:
        """Brings the present version to a server; returns None after marking it lost."""
        while (source := fan_out.take()) is None:
            await self._fetched.wait()
        try:
            record = await self._activate_from(server, source, fan_out)
        except ServerLostError as error:
            self.report_lost(server, str(error))
            return None
        finally:
            fan_out.give_back(source)
            self._fetched.fire()
        fan_out.add(server.client.target)
        self._fetched.fire()
        try:
            await self._verify_first(server, record)
        except ServerLostError as error:
            self.report_lost(server, str(error))
            return None
        await self._on_activated(record)
        return record

    async def _activate_from(self, server: RolloutServer, source: str, fan_out: FanOut) -> VersionRecord:
        """Brings the present version from a source, from the learner where that fails."""
        relay = source if source != fan_out.origin else None
        try:
            return await self._pusher.activate(server.client, self._version, self._digest, relay)
        except RelayError as error:
            fan_out.drop(source)
            self._notice(f"{error}; fetching from the learner instead of {source}")
            return await self._pusher.activate(server.client, self._version, self._digest)

    async def _verify_first(self, server: RolloutServer, record: VersionRecord) -> None:
        """Makes a server read the first version that it gets back from its engine; loads compare the later ones."""
        if not server.verified:
            await self._verifier.verify(server.client, record.version, record.digest)
            server.verified = True

    async def _recover(self, server: RolloutServer) -> None:
        """Waits for a lost server, brings it the present version and gives it work again."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._budgets.lost_s
        try:
            while loop.time() < end:
                await asyncio.sleep(self._budgets.poll_s)
                if await server.client.is_ready() and await self._catch_up(server):
                    server.state = ServerState.READY
                    self._notice(f"rollout server at {server.client.target} is back")
                    return
            server.state = ServerState.GONE
            self._notice(f"rollout server at {server.client.target} did not come back; the run goes on without it")
        except Exception as error:  # raised again by whoever asks for a server next
            self._fatal = error
        finally:
            self._changed.fire()

    async def _catch_up(self, server: RolloutServer) -> bool:
        """Brings the present version, again if a newer one appeared meanwhile; False if the server was lost again."""
        while True:
            version, digest = self._version, self._digest
            try:
                record = await self._pusher.activate(server.client, version, digest)
                await self._verify_first(server, record)
                await self._on_activated(record)
            except ServerLostError as error:
                server.trouble = str(error)
                return False
            except UnknownVersionError as error:  # the learner is a version ahead, which will be pushed soon
                if version == self._version:
                    server.trouble = str(error)
                    return False
                continue
            if version == self._version:
                return True

    def _gone_text(self) -> str:
        seen = "; ".join(f"{server.client.target}: {server.trouble}" for server in self.servers)
        limit = f"{self._budgets.lost_s:g} s"
        return f"all rollout servers were lost for more than {limit} ({seen}); start them and the run again"
