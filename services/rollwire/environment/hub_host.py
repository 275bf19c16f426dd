"""A tag that providers play, as the dispatcher of session calls sees it."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Mapping
from typing import Any

from rollwire.environment.hub import Hub
from rollwire.environment.hub_parts import Provider, Seat
from rollwire.rpc.errors import Reason, RollwireError, precondition
from rollwire.v1 import environment_pb2 as pb


class ProvidedTag:
    """Plays the sessions of one tag through the hub; a `rollwire.environment.hosts.Host`.

    Args:
        hub: Knows the providers.
        tag: The tag.
        timeout_s: Longest time for a start, a turn or a drawing.
        wake: Makes the stream of a provider look for calls to send.
    """

    def __init__(self, hub: Hub, tag: str, timeout_s: float, wake: Callable[[Provider], None]) -> None:
        self._hub = hub
        self._tag = tag
        self._timeout_s = timeout_s
        self._wake = wake

    @property
    def description(self) -> pb.EnvironmentDescription:
        """The tag as its providers describe it."""
        return self._hub.tags[self._tag].description

    @property
    def disabled(self) -> bool:
        """Whether nothing can be opened: it failed too often, or all its providers are leaving."""
        offered = self._hub.tags[self._tag]
        return offered.disabled or all(provider.draining for provider in offered.providers)

    async def start(self, options: Mapping[str, Any], seed: int) -> tuple[Seat | None, pb.OpenSessionResponse]:
        """Has a provider start an episode. Raises `RollwireError` when none can, or for a bad option."""
        outcome: Future[tuple[Seat | None, pb.OpenSessionResponse] | RollwireError] = _future()
        provider = self._hub.open(self._tag, options, seed, self._timeout_s, _deliver_to(outcome))
        self._wake(provider)
        found = await outcome
        if isinstance(found, RollwireError):
            raise found
        return found

    def play(self, episode: Seat, action: str) -> Future[pb.StepResponse]:
        """Has the provider play a turn; a failure is in the response."""
        outcome: Future[pb.StepResponse] = _future()
        self._hub.step(episode, action, self._timeout_s, _deliver_to(outcome))
        self._wake(episode.provider)
        return outcome

    def play_now(self, episode: Seat, action: str) -> None:
        """Plays nothing: every turn takes a provider."""

    async def draw(self, episode: Seat, render_format: pb.RenderFormat.ValueType) -> pb.RenderResponse:
        """Has the provider draw the present state. Raises `RollwireError` when it cannot."""
        offered = episode.provider.descriptions.get(self._tag)
        if offered is None or render_format not in offered.render_formats:
            raise precondition(
                Reason.RENDER_UNSUPPORTED,
                f"environment {self._tag} cannot draw {pb.RenderFormat.Name(render_format)}",
                environment_tag=self._tag,
            )
        outcome: Future[pb.RenderResponse | RollwireError] = _future()
        self._hub.render(episode, render_format, self._timeout_s, _deliver_to(outcome))
        self._wake(episode.provider)
        found = await outcome
        if isinstance(found, RollwireError):
            raise found
        return found

    async def close(self, episode: Seat) -> None:
        """Frees the provider's session; does not wait for it."""
        self._hub.close(episode)
        self._wake(episode.provider)


def _future() -> Future[Any]:
    return asyncio.get_running_loop().create_future()


def _deliver_to(outcome: Future[Any]) -> Callable[[Any], None]:
    def deliver(found: Any) -> None:
        if not outcome.done():  # whoever waited may have been cancelled
            outcome.set_result(found)

    return deliver
