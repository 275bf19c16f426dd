"""The environment servers that episodes are played on: clients, catalogues, and the choice of the least busy one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rollwire.client.environment import EnvironmentClient
from rollwire.client.environment_stream import SessionStream
from rollwire.rpc.errors import Reason, RollwireError, exhausted, not_found
from rollwire.v1 import environment_pb2

_MAX_TARGETS: Final = 256
_CATALOGUE_TIMEOUT_S: Final = 10.0


@dataclass(eq=False)
class EnvironmentServer:
    """One environment server as this process sees it.

    Attributes:
        client: Its client.
        calls: The calls of all its sessions, over one stream.
        sessions: Sessions that this process has open there, or is opening.
        catalogue: What it offers, once asked.
    """

    client: EnvironmentClient
    calls: SessionStream = field(init=False)
    sessions: int = 0
    catalogue: Mapping[str, environment_pb2.EnvironmentDescription] | None = None
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.calls = SessionStream(self.client)

    @property
    def idle(self) -> bool:
        """True if nobody uses it."""
        return not self.sessions and not self._asking.locked()

    async def close(self) -> None:
        """Closes stream and channel."""
        await self.calls.close()
        await self.client.close()

    async def describe(self, tag: str) -> environment_pb2.EnvironmentDescription:
        """Returns the description of a tag; the catalogue is asked for again when it lacks the tag.

        Raises:
            RollwireError: NOT_FOUND / `UNKNOWN_ENVIRONMENT`, or the server cannot be reached.
        """
        if self.catalogue is None or tag not in self.catalogue:
            async with self._asking:
                if self.catalogue is None or tag not in self.catalogue:
                    answer = await self.client.list_environments(timeout_s=_CATALOGUE_TIMEOUT_S)
                    self.catalogue = {entry.tag: entry for entry in answer.environments}
        if tag not in self.catalogue:
            known = ", ".join(sorted(self.catalogue)) or "none"
            raise not_found(
                Reason.UNKNOWN_ENVIRONMENT,
                f"environment_tag is {tag!r}, which {self.client.target} does not offer; it offers: {known}",
                tag=tag,
            )
        return self.catalogue[tag]


class EnvironmentPool:
    """Clients of the environment servers asked for last, at most `_MAX_TARGETS`."""

    def __init__(self) -> None:
        self._servers: OrderedDict[str, EnvironmentServer] = OrderedDict()  # the one unused longest first
        self._closing: set[asyncio.Task[None]] = set()

    def server(self, target: str) -> EnvironmentServer:
        """Returns the server at `host:port`.

        Raises:
            RollwireError: RESOURCE_EXHAUSTED / `SESSIONS_EXHAUSTED` when too many servers are played on at once.
        """
        if target not in self._servers:
            if len(self._servers) >= _MAX_TARGETS:
                self._forget_one()
            self._servers[target] = EnvironmentServer(EnvironmentClient(target))
        self._servers.move_to_end(target)
        return self._servers[target]

    def by_load(self, targets: Sequence[str]) -> list[EnvironmentServer]:
        """Returns the servers, those with the fewest sessions of this process first."""
        return sorted((self.server(target) for target in targets), key=lambda server: server.sessions)

    async def describe(self, targets: Sequence[str], tag: str) -> environment_pb2.EnvironmentDescription:
        """Returns the description of a tag from the first server that can be asked.

        Raises:
            RollwireError: No server can be reached, or one that can does not offer the tag.
        """
        failure: RollwireError | None = None
        for server in self.by_load(targets):
            try:
                return await server.describe(tag)
            except RollwireError as error:
                if error.reason == Reason.UNKNOWN_ENVIRONMENT:
                    raise
                failure = error
        assert failure is not None
        raise failure

    async def close(self) -> None:
        """Closes all streams and channels."""
        await asyncio.gather(*self._closing)
        for server in self._servers.values():
            await server.close()

    def _forget_one(self) -> None:
        """Makes room: servers come and go, and a rollout server may outlive many runs."""
        idle = next((target for target, server in self._servers.items() if server.idle), None)
        if idle is None:
            raise exhausted(
                Reason.SESSIONS_EXHAUSTED,
                f"this rollout server plays on {_MAX_TARGETS} environment servers, which is its limit",
                60.0,
            )
        task = asyncio.create_task(self._servers.pop(idle).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
