"""The ledger as the coordinator uses it: `LedgerStore` behind one writer thread, so that fsync blocks nobody.

A method that has returned has made its row durable; only then does the coordinator count what the row says.
Cancelling a caller does not tear a transaction: it happens as a whole or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from rollwire.coordinator.arrivals import Arrival, ArrivalState
from rollwire.coordinator.journal import Journal, JournalStep, WaitingGroup
from rollwire.coordinator.ledger_schema import (
    CheckpointRecord,
    GroupRecord,
    GroupState,
    RunRecord,
    StepPlan,
    StepResult,
    ValidationRecord,
    VersionRecord,
)
from rollwire.coordinator.ledger_store import LedgerStore
from rollwire.coordinator.run_dir import LEDGER_FILE
from rollwire.rpc.limits import MIB
from rollwire.v1 import trajectory_pb2

FILE_NAME: Final = LEDGER_FILE
KEEP_RECORDS_BYTES: Final = 1024 * MIB
"""Trajectory records that stay in the file; older ones keep their id and score only."""

PRUNE_EVERY_STEPS: Final = 20

_Result = TypeVar("_Result")


class Ledger:
    """The ledger of one run; made by `create`, ended by `close`.

    Attributes:
        epoch: Incarnation of the coordinator, for fences.
    """

    def __init__(self, store: LedgerStore, writer: ThreadPoolExecutor, epoch: int) -> None:
        self.epoch = epoch
        self._store = store
        self._writer = writer

    @classmethod
    async def create(cls, run_dir: Path, run: RunRecord) -> Self:
        """Makes the ledger of a new run. Raises `LedgerError`."""
        store, writer, epoch = await _open(run_dir, lambda store: store.create(run))
        return cls(store, writer, epoch)

    @classmethod
    async def resume(cls, run_dir: Path, config: str) -> tuple[Self, Journal]:
        """Goes on with the ledger of a run, as another incarnation; returns what the earlier ones did as well.

        Raises:
            LedgerError: It cannot be used.
        """
        store, writer, journal = await _open(run_dir, lambda store: store.resume(config))
        return cls(store, writer, journal.epoch), journal

    async def set_state(self, state: str) -> None:
        """Records the state of the run."""
        await self._write(self._store.set_state, state)

    async def accept_group(self, record: GroupRecord, step: int) -> bool:
        """Accepts a complete group; see `LedgerStore.accept_group`."""
        return await self._write(self._store.accept_group, record, step)

    async def drop_group(self, record: GroupRecord, state: GroupState) -> None:
        """Records a group that is given up."""
        await self._write(self._store.drop_group, record, state)

    async def add_arrival(self, arrival: Arrival) -> bool:
        """Makes a trajectory durable that waits for its group; see `LedgerStore.add_arrival`."""
        return await self._write(self._store.add_arrival, arrival)

    async def knows_arrival(self, trajectory_id: str) -> bool:
        """Tells whether a trajectory was accepted before, whatever became of it."""
        return await self._write(self._store.knows_arrival, trajectory_id)

    async def fate_of_group(self, tag: str, group_id: str) -> ArrivalState | None:
        """Returns what became of a group of which trajectories arrived; None when none did."""
        return await self._write(self._store.fate_of_group, tag, group_id)

    async def arrivals(self, tag: str | None = None, group_id: str | None = None) -> list[Arrival]:
        """Returns the trajectories that wait, of all groups or of one."""
        return await self._write(self._store.arrivals, tag, group_id)

    async def end_arrivals(self, tag: str, group_id: str, state: ArrivalState) -> None:
        """Gives up what waits of a group."""
        await self._write(self._store.end_arrivals, tag, group_id, state)

    async def plan_step(self, plan: StepPlan) -> None:
        """Records what a step is about to train."""
        await self._write(self._store.plan_step, plan)

    async def commit_step(self, result: StepResult) -> None:
        """Records that a planned step is done, and keeps the file within its size."""
        await self._write(self._store.commit_step, result)
        if result.step % PRUNE_EVERY_STEPS == 0:
            await self._write(self._store.prune, KEEP_RECORDS_BYTES)

    async def add_checkpoint(self, record: CheckpointRecord, keep: int) -> None:
        """Records a checkpoint; only the `keep` newest ones stay."""
        await self._write(self._store.add_checkpoint, record, keep)

    async def step_groups(self, step: JournalStep) -> list[list[trajectory_pb2.Trajectory]]:
        """Returns the trajectories that a step was planned with; empty when they are no longer there."""
        return await self._write(self._store.step_groups, step)

    async def waiting_groups(self) -> list[WaitingGroup]:
        """Returns the groups that were accepted and that no step has consumed."""
        return await self._write(self._store.waiting_groups)

    async def add_version(self, record: VersionRecord) -> None:
        """Records that a rollout server activated a version."""
        await self._write(self._store.add_version, record)

    async def add_validation(self, records: Sequence[ValidationRecord]) -> None:
        """Records the episodes of one validation."""
        await self._write(self._store.add_validation, records)

    async def close(self) -> None:
        """Closes the file after everything that was asked for is written."""
        await self._write(self._store.close)
        self._writer.shutdown()

    async def _write(self, method: Callable[..., _Result], *arguments: Any) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._writer, method, *arguments)


async def _open(
    run_dir: Path, begin: Callable[[LedgerStore], _Result]
) -> tuple[LedgerStore, ThreadPoolExecutor, _Result]:
    """Opens the file in a thread of its own and does the first thing with it."""
    writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")

    def make() -> tuple[LedgerStore, _Result]:
        store = LedgerStore(run_dir / FILE_NAME)
        return store, begin(store)

    try:
        store, result = await asyncio.get_running_loop().run_in_executor(writer, make)
    except BaseException:
        writer.shutdown(wait=False)
        raise
    return store, writer, result
