"""Who plays the sessions of a tag: the server itself, or a hub in the name of providers. Tags may come and go."""

from __future__ import annotations

import difflib
from asyncio import Future
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from rollwire.rpc.errors import Reason, RollwireError, not_found
from rollwire.v1 import environment_pb2 as pb


class HostedEpisode(Protocol):
    """An episode as its host knows it."""

    @property
    def ended(self) -> bool:
        """Whether no turn can follow. True once a reply with `failure`, `terminated` or `truncated` was given."""


class Host(Protocol):
    """Starts, plays, draws and closes the episodes of one tag.

    The turns of one episode never overlap. What a host awaits ends within limits of its own: it goes on when its caller
    gives up, so that a repeat finds the outcome.
    """

    @property
    def description(self) -> pb.EnvironmentDescription:
        """The tag as the catalogue shows it."""

    @property
    def disabled(self) -> bool:
        """Whether the catalogue leaves the tag out, because nothing can be opened."""

    async def start(self, options: Mapping[str, Any], seed: int) -> tuple[HostedEpisode | None, pb.OpenSessionResponse]:
        """Starts an episode; without one, the response has `failure` set. Raises `RollwireError` for a bad option."""

    def play(self, episode: Any, action: str) -> Coroutine[Any, Any, pb.StepResponse] | Future[pb.StepResponse]:
        """Plays a turn; a failure is in the response. A future spares the cost of a task."""

    def play_now(self, episode: Any, action: str) -> pb.StepResponse | None:
        """Plays a turn without waiting; None when only `play` can."""

    async def draw(self, episode: Any, render_format: pb.RenderFormat.ValueType) -> pb.RenderResponse:
        """Draws the present state. Raises `RollwireError` when that is impossible."""

    async def close(self, episode: Any) -> None:
        """Frees what the episode holds, after what it is doing now."""


class Hosts:
    """The hosts of a server, by tag."""

    def __init__(self, hosts: Mapping[str, Host]) -> None:
        self._hosts = dict(hosts)

    def add(self, tag: str, host: Host) -> None:
        """Offers a tag from now on."""
        self._hosts[tag] = host

    def remove(self, tag: str) -> None:
        """Offers a tag no longer; its sessions go on."""
        self._hosts.pop(tag, None)

    def get(self, tag: str) -> Host | None:
        """Returns the host of a tag, if there is one."""
        return self._hosts.get(tag)

    def tags(self) -> list[str]:
        """Returns all tags, ascending, disabled ones included."""
        return sorted(self._hosts)

    def descriptions(self) -> list[pb.EnvironmentDescription]:
        """Returns the catalogue, ascending by tag, without what is disabled."""
        return [self._hosts[tag].description for tag in self.tags() if not self._hosts[tag].disabled]

    def find(self, tag: str) -> Host:
        """Returns the host of a tag. Raises `RollwireError` NOT_FOUND when there is none."""
        found = self._hosts.get(tag)
        if found is None:
            raise self._unknown(tag)
        return found

    def _unknown(self, tag: str) -> RollwireError:
        near = difflib.get_close_matches(tag, self._hosts, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return not_found(
            Reason.UNKNOWN_ENVIRONMENT,
            f"no environment has the tag {tag!r}{hint}; registered: {', '.join(self.tags())} "
            "(others go into the server's configuration under environment.definitions, or attach as providers)",
            environment_tag=tag,
        )
