"""Has the learner go back to a checkpoint, again while it is busy or cannot be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from rollwire.client.learner import LearnerClient
from rollwire.coordinator.budgets import Budgets
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.ledger_schema import CheckpointRecord
from rollwire.coordinator.weight_push import LOST_CODES
from rollwire.coordinator.wording import counted
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import learner_pb2, trajectory_pb2

_UNUSABLE: Final = (Reason.CHECKPOINT_CORRUPT, Reason.UNKNOWN_CHECKPOINT)


class CheckpointLoader:
    """Loads checkpoints of a run.

    Args:
        client: The learner.
        fence: Identifies this coordinator.
        busy_s: How long the learner may go on with a step that an earlier coordinator asked for.
        budgets: Bounds of retries.
        notice: Tells people about checkpoints that cannot be used.
    """

    def __init__(
        self,
        client: LearnerClient,
        fence: trajectory_pb2.Fence,
        busy_s: float,
        budgets: Budgets,
        notice: Callable[[str], None],
    ) -> None:
        self._client = client
        self._fence = fence
        self._busy_s = busy_s
        self._budgets = budgets
        self._notice = notice

    async def load(self, record: CheckpointRecord, *, new_lineage: bool) -> learner_pb2.LoadCheckpointResponse | None:
        """Loads a checkpoint; returns None when it is damaged or gone.

        Args:
            record: The checkpoint.
            new_lineage: The learner gives its state the first version of a new lineage.

        Raises:
            RunError: The learner refuses it for another reason, or cannot be reached.
        """
        request = learner_pb2.LoadCheckpointRequest(
            fence=self._fence, name=record.name, version=record.version, new_lineage=new_lineage
        )
        now = asyncio.get_running_loop().time
        busy_until, lost_until = now() + self._busy_s, now() + self._budgets.lost_s
        while True:
            try:
                return await self._client.load_checkpoint(request)
            except RollwireError as error:
                if error.reason in _UNUSABLE:
                    which = f"the checkpoint after {counted(record.step, 'step')}"
                    self._notice(f"{which} cannot be used, the one before is tried: {error.message}")
                    return None
                busy = error.reason == Reason.STEP_IN_PROGRESS and now() < busy_until
                lost = error.code in LOST_CODES and now() < lost_until
                if not busy and not lost:
                    raise RunError(
                        f"the learner at {self._client.target} does not load the checkpoint {record.name}: {error}"
                    ) from error
            await asyncio.sleep(self._budgets.poll_s)
