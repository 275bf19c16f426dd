"""The service side of `rollwire bench rollout`: the servers that `rollwire launch` starts, and their episodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime

from google.protobuf.struct_pb2 import Struct

from rollwire.client.rollout import RolloutClient
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.launcher import LocalLauncher
from rollwire.coordinator.peers import Peers
from rollwire.coordinator.run_dir import create_run_dir
from rollwire.rpc.ids import new_id
from rollwire.serving.config import RunConfig
from rollwire.serving.logs import get_logger
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2

_log = get_logger(__name__)


@dataclass(frozen=True)
class Played:
    """A round of episodes.

    Attributes:
        seconds: From the first call to the last result.
        groups: The episodes of each group, in the order of their indices.
    """

    seconds: float
    groups: list[list[trajectory_pb2.Trajectory]]


class ServiceSide:
    """Plays groups on a rollout server that has the learner's version 0.

    Args:
        config: What is played and how.
        client: The rollout server.
        environment_targets: Environment servers.
        pids: Process ids by kind of server.
    """

    def __init__(
        self, config: RunConfig, client: RolloutClient, environment_targets: Sequence[str], pids: dict[str, int]
    ) -> None:
        self.pids = pids
        self._config = config
        self._client = client
        self._targets = environment_targets
        self._fence = trajectory_pb2.Fence(run_id=new_id("bench"), epoch=1)
        self._groups = 0

    async def activate(self, version: weights_pb2.WeightVersion, learner_target: str) -> None:
        """Makes the server fetch the weights."""
        source = weights_pb2.WeightSource(target=learner_target)
        request = rollout_pb2.UpdateWeightsRequest(fence=self._fence, version=version, source=source)
        await self._client.update_weights(request, timeout_s=self._config.timeouts.update_s)

    async def play(self, groups: int, episodes_per_group: int, groups_at_once: int) -> Played:
        """Plays groups that were not played before, so many at once.

        Raises:
            RunError: An episode failed.
        """
        free = asyncio.Semaphore(groups_at_once)

        async def play_group(number: int) -> list[trajectory_pb2.Trajectory]:
            async with free:
                return await self._play_group(number, episodes_per_group)

        numbers = range(self._groups, self._groups + groups)
        self._groups += groups
        start = time.perf_counter()
        played = await asyncio.gather(*map(play_group, numbers))
        return Played(time.perf_counter() - start, played)

    async def _play_group(self, number: int, episodes: int) -> list[trajectory_pb2.Trajectory]:
        config, environment = self._config, self._config.environments[0]
        options = Struct()
        options.update(environment.options)
        request = rollout_pb2.RunGroupRequest(
            fence=self._fence,
            group_id=f"bench-{number}",
            environment_tag=environment.tag,
            environment_seed=config.run.seed + number,
            environment_options=options,
            episodes=episodes,
            sampling_seed=config.run.seed + number,
            sampling=trajectory_pb2.SamplingSettings(
                temperature=config.sampling.temperature,
                top_p=config.sampling.top_p,
                top_k=config.sampling.top_k,
                max_tokens=config.rollout.max_new_tokens_per_turn,
            ),
            max_episode_tokens=config.rollout.max_episode_tokens,
            environment_targets=self._targets,
        )
        found = []
        async for result in self._client.run_group(request, timeout_s=config.timeouts.group_s):
            if result.HasField("failure"):
                raise RunError(f"an episode of the benchmark failed: {result.failure.message}")
            found.append(result.trajectory)
        return sorted(found, key=lambda trajectory: trajectory.episode_index)


@asynccontextmanager
async def service_side(config: RunConfig) -> AsyncIterator[ServiceSide]:
    """Starts environment server, learner and rollout server, gives the latter version 0, and ends them afterwards.

    Args:
        config: The run; its directory is made under `run.output_dir`.

    Raises:
        RunError: A server does not start.
        ServeError: A server cannot be used.
    """
    launcher = LocalLauncher(config, create_run_dir(config, datetime.now().astimezone()))
    try:
        services = await launcher.start()
        async with Peers(config.model_copy(update={"services": services})) as peers:
            await _ready(launcher, peers, config.timeouts.ready_s)
            side = ServiceSide(config, peers.rollouts[0], services.environment, dict(launcher.pids))
            await side.activate((await peers.learner.get_info()).version, services.learner[0])
            yield side
    finally:
        await launcher.stop()


async def _ready(launcher: LocalLauncher, peers: Peers, timeout_s: float) -> None:
    """Waits until all servers can answer; one that ends is reported with its own last words."""
    waiting = asyncio.create_task(peers.wait_ready(timeout_s, _log.warning))
    watching = asyncio.create_task(launcher.watch())
    try:
        await asyncio.wait([waiting, watching], return_when=asyncio.FIRST_COMPLETED)
        await (watching if watching.done() else waiting)
    finally:
        for task in (waiting, watching):
            task.cancel()
        await asyncio.wait([waiting, watching])
