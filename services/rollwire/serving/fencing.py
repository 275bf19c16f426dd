"""Fencing (I4): a coordinator that was replaced cannot change anything. A pure state machine."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import grpc

from rollwire.rpc.errors import Reason, RollwireError, invalid_field
from rollwire.rpc.ids import is_name
from rollwire.v1 import trajectory_pb2

_MAX_RUNS: Final = 1024


class Fencing:
    """Remembers the highest epoch seen of each run; of `_MAX_RUNS` runs, the longest unseen is forgotten first."""

    def __init__(self) -> None:
        self._epochs: OrderedDict[str, int] = OrderedDict()

    def admit(self, fence: trajectory_pb2.Fence) -> None:
        """Accepts a call of the current coordinator, or of a newer one.

        Raises:
            RollwireError: INVALID_ARGUMENT for a malformed fence, ABORTED / `FENCED` for an epoch that was replaced.
        """
        if not is_name(fence.run_id):
            raise invalid_field("fence.run_id", fence.run_id, "[a-z0-9][a-z0-9_.-]{0,62} without '..'")
        if fence.epoch < 1:
            raise invalid_field("fence.epoch", fence.epoch, "a number >= 1")
        seen = self._epochs.get(fence.run_id, 0)
        if fence.epoch < seen:
            raise RollwireError(
                grpc.StatusCode.ABORTED,
                Reason.FENCED,
                f"epoch {fence.epoch} of run {fence.run_id} was replaced by epoch {seen}; this coordinator must stop",
                metadata={"run_id": fence.run_id, "epoch": str(fence.epoch), "current_epoch": str(seen)},
            )
        self._epochs[fence.run_id] = fence.epoch
        self._epochs.move_to_end(fence.run_id)
        if len(self._epochs) > _MAX_RUNS:
            self._epochs.popitem(last=False)
