"""Has the learner save checkpoints when they are due, and remembers them in the ledger."""

from __future__ import annotations

from rollwire.client.learner import LearnerClient
from rollwire.coordinator.ledger import Ledger
from rollwire.coordinator.ledger_schema import CheckpointRecord
from rollwire.coordinator.status import RunStatus
from rollwire.coordinator.wording import counted
from rollwire.rpc.errors import RollwireError
from rollwire.rpc.versions import version_text
from rollwire.serving.config import RunConfig
from rollwire.v1 import learner_pb2, trajectory_pb2, weights_pb2


class CheckpointKeeper:
    """Saves the checkpoints of a run. One that cannot be saved is told about, and training goes on.

    Args:
        client: The learner.
        config: The run.
        fence: Identifies this coordinator.
        ledger: Where checkpoints are recorded.
        status: Tells people what happens.
    """

    def __init__(
        self,
        client: LearnerClient,
        config: RunConfig,
        fence: trajectory_pb2.Fence,
        ledger: Ledger,
        status: RunStatus,
    ) -> None:
        self._client = client
        self._run = config.run
        self._fence = fence
        self._ledger = ledger
        self._status = status
        self._saved_at: int | None = None
        self.problem: str | None = None
        """Why the last attempt left no checkpoint; None when it did."""

    def found(self, steps_done: int) -> None:
        """Notes that there is a checkpoint after so many steps already."""
        self._saved_at = steps_done

    def due(self, steps_done: int) -> bool:
        """Tells whether a checkpoint is to be saved after so many steps."""
        every = self._run.checkpoint_every_steps
        return every > 0 and steps_done % every == 0

    async def save(self, steps_done: int, version: weights_pb2.WeightVersion) -> float | None:
        """Saves a checkpoint unless it is there; returns its size in bytes, None if there is no new one."""
        if self._saved_at == steps_done:
            return None
        self._status.begin_phase("saving a checkpoint")
        # Another incarnation may come to the same step with other weights.
        again = f"-e{self._fence.epoch}" if self._fence.epoch > 1 else ""
        name = f"{self._fence.run_id}-{steps_done:06d}{again}"
        request = learner_pb2.SaveCheckpointRequest(fence=self._fence, name=name, keep=self._run.keep_checkpoints)
        try:
            response = await self._client.save_checkpoint(request)
        except RollwireError as error:
            self._tell(steps_done, error.message)
            return None
        if response.version != version:
            self._tell(steps_done, f"the learner saved {version_text(response.version)} as {name}")
            return None
        record = CheckpointRecord(name, steps_done, version, response.digest, response.path, response.bytes)
        await self._ledger.add_checkpoint(record, self._run.keep_checkpoints)
        self._saved_at, self.problem = steps_done, None
        return float(response.bytes)

    def _tell(self, steps_done: int, why: str) -> None:
        """Tells that there is no checkpoint, and when the next one is tried."""
        self.problem = f"there is no checkpoint after {counted(steps_done, 'step')}: {why}"
        every, last = self._run.checkpoint_every_steps, self._run.max_steps
        if steps_done >= last or self._status.stop_cause is not None:
            self._status.notice(self.problem)
            return
        after = steps_done + every
        then = f"after {counted(after, 'step')}" if every > 0 and after < last else "at the end of the run"
        self._status.notice(f"{self.problem}. The run goes on; the next one is tried {then}")
