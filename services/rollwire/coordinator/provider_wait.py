"""Waits for environments that no server offers yet: providers may dial in after the servers are up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from rollwire.client.environment import EnvironmentClient
from rollwire.coordinator.peers import Peers
from rollwire.coordinator.status import RunStatus
from rollwire.coordinator.wording import did_you_mean
from rollwire.rpc.errors import RollwireError
from rollwire.serving.config import RunConfig

POLL_S: Final = 0.5


async def wait_for_tags(config: RunConfig, peers: Peers, status: RunStatus) -> None:
    """Returns when every environment server offers every tag of the run, or when `timeouts.ready_s` has passed.

    Whether they do is for `rollwire.coordinator.preflight` to say.

    Args:
        config: The run.
        peers: Its servers, ready.
        status: Told what is missing; a run that is asked to stop waits no longer.
    """
    wanted = {entry.tag for entry in config.environments if entry.source == "environment"}
    end_s = asyncio.get_running_loop().time() + config.timeouts.ready_s
    told: Mapping[str, list[str]] = {}
    while missing := await _missing(peers.environments, wanted):
        if asyncio.get_running_loop().time() >= end_s or status.stop_cause is not None:
            return
        if missing != told:
            told = missing
            what = "; ".join(f"{target} does not offer {', '.join(tags)}" for target, tags in missing.items())
            status.begin_phase("waiting for providers")
            status.notice(
                f"{what} yet: waiting up to timeouts.ready_s={config.timeouts.ready_s:g} s for a provider that serves "
                "it (`rollwire env list --target` shows what there is)"
            )
        await asyncio.sleep(POLL_S)


async def _missing(clients: list[EnvironmentClient], wanted: set[str]) -> dict[str, list[str]]:
    """Returns what each server lacks, with what may have been meant.

    A server that does not answer is not asked to: preflight says so.
    """
    found = {}
    for client in clients:
        try:
            listed = await client.list_environments()
        except RollwireError:
            continue
        if lacking := wanted - {entry.tag for entry in listed.environments}:
            offered = sorted(entry.tag for entry in listed.environments)
            found[client.target] = [tag + did_you_mean(tag, offered) for tag in sorted(lacking)]
    return found
