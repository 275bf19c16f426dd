"""A lost server that returns while the learner is already a version ahead waits for that version."""

from __future__ import annotations

import asyncio
from typing import Any

from rollwire.coordinator.budgets import Budgets
from rollwire.coordinator.ledger_schema import VersionRecord
from rollwire.coordinator.rollout_pool import RolloutPool, ServerState
from rollwire.coordinator.weight_push import UnknownVersionError
from rollwire.v1 import weights_pb2


def version(step: int) -> weights_pb2.WeightVersion:
    return weights_pb2.WeightVersion(lineage="line", step=step)


class Client:
    target = "127.0.0.1:1"

    async def is_ready(self) -> bool:
        return True


class Pusher:
    """Brings the version that the learner holds, and no other one."""

    learner_target = "127.0.0.1:2"

    def __init__(self) -> None:
        self.held = 0
        self.refused = 0
        self.brought: list[int] = []

    async def activate(self, client: Any, version: Any, digest: bytes, relay: str | None = None) -> VersionRecord:
        await asyncio.sleep(0)
        if version.step != self.held:
            self.refused += 1
            raise UnknownVersionError("the learner has another one")
        self.brought.append(version.step)
        return VersionRecord(version, client.target, digest, 1, 0.1, 0.1)


class Verifier:
    """Finds every server right, and remembers which versions it looked at."""

    def __init__(self) -> None:
        self.verified: list[int] = []

    async def verify(self, client: Any, version: Any, digest: bytes) -> None:
        self.verified.append(version.step)


async def recorded(record: VersionRecord) -> None:
    pass


async def test_the_next_version_is_waited_for() -> None:
    pusher = Pusher()
    budgets = Budgets(attempts=1, retry_delay_s=0.01, lost_s=20.0, poll_s=0.01)
    verifier = Verifier()
    pool = RolloutPool(
        [Client()],  # type: ignore[list-item]
        [4],
        pusher,  # type: ignore[arg-type]
        verifier,  # type: ignore[arg-type]
        budgets,
        recorded,
        lambda text: None,
    )
    (server,) = pool.servers
    await pool.push(version(0), b"zero")
    pusher.held = 1  # published, but not pushed yet
    pool.report_lost(server, "gone")
    async with asyncio.timeout(10):
        while pusher.refused < 3:
            await asyncio.sleep(0.01)
        assert server.state is ServerState.LOST
        await pool.push(version(1), b"one")
        while server.state is not ServerState.READY:
            await asyncio.sleep(0.01)
    assert pusher.brought == [0, 1]
    await pool.push(version(1), b"one")
    assert verifier.verified == [0, 1], "the first version ever, and the first one after it was lost"
    await pool.close()
