"""The servers that a run uses: clients, waiting for readiness, what they say about themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import grpc

from rollwire.client.base import ServiceClient
from rollwire.client.environment import EnvironmentClient
from rollwire.client.learner import LearnerClient
from rollwire.client.rollout import RolloutClient
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.tasks import run_all
from rollwire.rpc.errors import RollwireError
from rollwire.serving.config import ConfigError, RunConfig
from rollwire.v1 import coordinator_pb2, environment_pb2, learner_pb2, rollout_pb2

READY_POLL_S: Final = 0.1
NOTICE_S: Final = 10.0
"""Wait for servers after which people are told which ones are missed."""


@dataclass(frozen=True)
class Descriptions:
    """What the servers say about themselves, in the order of the clients."""

    environments: Sequence[environment_pb2.ListEnvironmentsResponse]
    rollouts: Sequence[rollout_pb2.RolloutServiceGetInfoResponse]
    learner: learner_pb2.LearnerServiceGetInfoResponse


def check_addresses(config: RunConfig) -> None:
    """Checks that there is an address of every kind that the run needs, and of one learner.

    Raises:
        ConfigError: There is not.
    """
    services = config.services
    plays = any(entry.source == "environment" for entry in config.environments)
    for kind in ("environment", "rollout", "learner"):
        if not getattr(services, kind) and (kind != "environment" or plays):
            raise ConfigError(
                f"services.{kind} is empty; give the address of a running server, such as "
                f"services.{kind}=[127.0.0.1:50051], or let `rollwire launch` start the servers"
            )
    if len(services.learner) > 1:
        raise ConfigError(f"services.learner lists {len(services.learner)} addresses; exactly one is allowed")


class Peers:
    """Clients of all servers of a run; close with `close` or use as an async context manager.

    Args:
        config: The run, with addresses as `check_addresses` wants them.
    """

    def __init__(self, config: RunConfig) -> None:
        check_addresses(config)
        services = config.services
        self.environments = [EnvironmentClient(target) for target in services.environment]
        self.rollouts = [RolloutClient(target) for target in services.rollout]
        self.learner = LearnerClient(services.learner[0])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def all(self) -> list[tuple[coordinator_pb2.ServiceKind.ValueType, ServiceClient]]:
        """Every client with its kind."""
        return [
            *((coordinator_pb2.SERVICE_KIND_ENVIRONMENT, client) for client in self.environments),
            *((coordinator_pb2.SERVICE_KIND_ROLLOUT, client) for client in self.rollouts),
            (coordinator_pb2.SERVICE_KIND_LEARNER, self.learner),
        ]

    async def wait_ready(self, timeout_s: float, notice: Callable[[str], object]) -> None:
        """Waits until every server can answer.

        Args:
            timeout_s: Longest wait.
            notice: Told which servers are missed, once some time has passed.

        Raises:
            RunError: Names those that cannot answer and what was seen.
        """
        found = await run_all(self._wait(kind, client, timeout_s, notice) for kind, client in self.all)
        missing = [text for text in found if text]
        if missing:
            raise RunError(
                f"not ready after timeouts.ready_s={timeout_s:g} s: {'; '.join(missing)}; check that it runs, that the "
                "address is right and what its log says"
            )

    async def describe(self) -> Descriptions:
        """Asks every server what it is. Raises `RunError`."""
        try:
            return Descriptions(
                environments=await run_all(client.list_environments() for client in self.environments),
                rollouts=await run_all(client.get_info() for client in self.rollouts),
                learner=await self.learner.get_info(),
            )
        except RollwireError as error:
            raise RunError(f"a server does not describe itself: {error}") from error

    async def close(self) -> None:
        """Closes all channels."""
        await asyncio.gather(*(client.close() for _, client in self.all))

    @staticmethod
    async def _wait(
        kind: coordinator_pb2.ServiceKind.ValueType,
        client: ServiceClient,
        timeout_s: float,
        notice: Callable[[str], object],
    ) -> str:
        """Returns an empty text once the server is ready, or what was seen when the time is over."""
        early_s = min(NOTICE_S, timeout_s)
        if await client.wait_ready(early_s, READY_POLL_S):
            return ""
        name = f"{kind_name(kind)} server at {client.target}"
        if timeout_s > early_s:
            notice(f"waiting for the {name} ({await _seen(kind, client)}), up to timeouts.ready_s={timeout_s:g} s")
            if await client.wait_ready(timeout_s - early_s, READY_POLL_S):
                return ""
        return f"{name} ({await _seen(kind, client)})"


async def _seen(kind: coordinator_pb2.ServiceKind.ValueType, client: ServiceClient) -> str:
    """Returns what a server that is not ready says to a call."""
    try:
        await _ask(client, timeout_s=5.0)
    except RollwireError as error:
        if error.code is grpc.StatusCode.UNIMPLEMENTED:
            return f"something answers there, but it is no {kind_name(kind)} server"
        return error.message
    return "it answers calls, but its health service does not say SERVING"


async def _ask(client: ServiceClient, timeout_s: float) -> None:
    """Calls the read-only method by which a server describes itself. Raises `RollwireError`."""
    if isinstance(client, EnvironmentClient):
        await client.list_environments(timeout_s=timeout_s)
    elif isinstance(client, RolloutClient | LearnerClient):
        await client.get_info(timeout_s=timeout_s)


def kind_name(kind: coordinator_pb2.ServiceKind.ValueType) -> str:
    """Returns `environment`, `rollout`, `learner` or `coordinator`."""
    return coordinator_pb2.ServiceKind.Name(kind).removeprefix("SERVICE_KIND_").lower()
