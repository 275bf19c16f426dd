"""SaveCheckpoint and LoadCheckpoint end to end: between two training steps, never beside one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

from rollwire.learner.checkpoint import LoadOrder, SaveOrder
from rollwire.learner.checkpoint_files import CheckpointDirectory
from rollwire.learner.torch_thread import TorchThread
from rollwire.learner.trainer import LoadedCheckpoint, Trainer
from rollwire.learner.training import Training
from rollwire.learner.training_calls import Claim
from rollwire.rpc.errors import invalid_field
from rollwire.rpc.ids import is_name, new_id
from rollwire.rpc.versions import version_text
from rollwire.serving.fencing import Fencing
from rollwire.serving.logs import get_logger
from rollwire.v1 import learner_pb2

_log = get_logger(__name__)
_Result = TypeVar("_Result")
DIRECTORY: Final = "checkpoints"
"""Directory of checkpoints below `run.output_dir`."""


class CheckpointCalls:
    """Answers calls about checkpoints; lives on the event loop and computes in `torch_thread`.

    What has begun goes on when the caller goes away.

    Args:
        root: Directory of checkpoints.
        trainer: What is saved.
        training: Knows the present version and which step runs.
        fencing: Refuses coordinators that were replaced.
        torch_thread: Where all torch work runs.
    """

    def __init__(
        self, root: Path, trainer: Trainer, training: Training, fencing: Fencing, torch_thread: TorchThread
    ) -> None:
        self._root = str(root.absolute())
        self._trainer = trainer
        self._training = training
        self._fencing = fencing
        self._torch_thread = torch_thread
        self._running: set[asyncio.Task[Any]] = set()

    async def save(self, request: learner_pb2.SaveCheckpointRequest) -> learner_pb2.SaveCheckpointResponse:
        """Answers `LearnerService.SaveCheckpoint`. Raises `RollwireError` as the contract says."""
        _check_name(request.name)
        self._fencing.admit(request.fence)
        calls = self._training.calls
        order = SaveOrder(
            root=self._root,
            name=request.name,
            run_id=request.fence.run_id,
            keep=request.keep,
            version=calls.version,
            calls=calls.saved(),
        )
        claim = calls.hold(f"checkpoint {request.name} is being saved")
        manifest = await self._to_the_end(claim, self._torch_thread.run(self._trainer.save_checkpoint, order))
        return learner_pb2.SaveCheckpointResponse(
            path=str(Path(self._root) / request.name),
            version=manifest.version,
            digest=manifest.digest,
            bytes=manifest.total_bytes,
        )

    async def load(self, request: learner_pb2.LoadCheckpointRequest) -> learner_pb2.LoadCheckpointResponse:
        """Answers `LearnerService.LoadCheckpoint`. Raises `RollwireError` as the contract says."""
        _check_name(request.name)
        self._fencing.admit(request.fence)
        order = LoadOrder(self._root, request.name, request.version)
        claim = self._training.calls.hold(f"checkpoint {request.name} is being loaded")
        loaded = await self._to_the_end(claim, self._load(order, new_id("lineage") if request.new_lineage else ""))
        _log.info("checkpoint loaded", name=request.name, version=version_text(loaded.manifest.version))
        return learner_pb2.LoadCheckpointResponse(version=loaded.manifest.version, digest=loaded.manifest.digest)

    async def _load(self, order: LoadOrder, lineage: str) -> LoadedCheckpoint:
        try:
            loaded = await self._torch_thread.run(self._trainer.load_checkpoint, order, lineage)
        except BaseException:
            await self._training.start_lineage_if_changed()
            raise
        self._training.go_on_from(loaded)
        return loaded

    async def _to_the_end(self, claim: Claim, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Returns what the work returns, and gives the claim up when it ends."""
        task = asyncio.create_task(work)
        self._running.add(task)

        def ended(_: asyncio.Task[_Result]) -> None:
            self._running.discard(task)
            self._training.calls.release(claim)
            if not task.cancelled():
                task.exception()  # the caller may be gone

        task.add_done_callback(ended)
        return await asyncio.shield(task)


def remove_leftovers(root: Path) -> None:
    """Removes what a process left that died while it saved."""
    try:
        for name in CheckpointDirectory(root).remove_leftovers():
            _log.warning("an unfinished checkpoint was removed", directory=str(root), name=name)
    except OSError as error:
        _log.warning("unfinished checkpoints cannot be removed", directory=str(root), error=str(error))


def _check_name(name: str) -> None:
    if not is_name(name):
        raise invalid_field("name", name, "[a-z0-9][a-z0-9_.-]{0,62} without '..'")
