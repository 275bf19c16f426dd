"""Checks before a run that its environments take the options of their entries: each is opened once and closed again."""

from __future__ import annotations

from typing import Final

import grpc

from rollwire.client.environment import EnvironmentClient
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.planner import options_struct
from rollwire.coordinator.seeds import environment_seed
from rollwire.coordinator.tasks import run_all
from rollwire.rpc.errors import RollwireError
from rollwire.rpc.ids import new_id
from rollwire.serving.config import RunConfig
from rollwire.serving.config.environments import TrainEnvironment
from rollwire.serving.logs import get_logger
from rollwire.v1 import environment_pb2

OPEN_LIMIT_S: Final = 30.0
LEASE_S: Final = 60
"""Ends a session whose answer was lost."""

_log = get_logger(__name__)


async def check_options(config: RunConfig, clients: list[EnvironmentClient]) -> None:
    """Opens one session for every entry with options on every environment server.

    An environment that is slow, full or fails is no error here: the run bounds and counts what happens to its episodes.

    Raises:
        RunError: A server refuses the options of an entry.
    """
    entries = [entry for entry in config.environments if entry.source == "environment" and entry.options]
    await run_all(
        _check(entry, client, environment_seed(config.run.seed, "train", entry.tag, 0))
        for entry in entries
        for client in clients
    )


async def _check(entry: TrainEnvironment, client: EnvironmentClient, seed: int) -> None:
    request = environment_pb2.OpenSessionRequest(
        request_id=new_id("check"),
        environment_tag=entry.tag,
        seed=seed,
        options=options_struct(entry.options),
    )
    request.lease.FromSeconds(LEASE_S)
    try:
        answer = await client.open_session(request, timeout_s=OPEN_LIMIT_S)
        if answer.session_id:
            await client.close_session(answer.session_id, timeout_s=OPEN_LIMIT_S)
    except RollwireError as error:
        if error.code is grpc.StatusCode.INVALID_ARGUMENT:
            raise RunError(
                f"environments entry {entry.tag!r} has options that the environment server at {client.target} refuses: "
                f"{' '.join(error.message.split())}"
            ) from error
        _log.info("options not checked", tag=entry.tag, server=client.target, error=str(error))
