"""Saving and loading the whole state of a learner, by all of its ranks together.

Tensors go through torch.distributed.checkpoint and its Hugging Face storage: every rank writes its shards as
safetensors files that say where in the whole tensor each piece belongs, so that any other number of ranks can read it.
With several ranks on several hosts the directory must be on a file system that all of them share.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from rollwire.learner.checkpoint_files import CheckpointDirectory, describe_file, write_state
from rollwire.learner.checkpoint_manifest import Manifest, corrupt, new_manifest
from rollwire.learner.checkpoint_state import (
    TrainedModel,
    describe,
    difference,
    generators,
    restore_generators,
)
from rollwire.learner.distributed import Ranks
from rollwire.learner.storage import is_refusal, storage_failed
from rollwire.rpc.errors import Reason, RollwireError, precondition
from rollwire.rpc.versions import version_text
from rollwire.serving.logs import get_logger
from rollwire.v1 import weights_pb2

_log = get_logger(__name__)
FILE_BYTES: Final = 1 << 30
"""Tensors are gathered into files of about this size; a rank holds one of its shards in host memory twice at a time."""


@dataclass(frozen=True)
class SaveOrder:
    """What is to be saved beside the models.

    Attributes:
        root: Directory of checkpoints.
        name: Name of the checkpoint.
        run_id: Run that it belongs to.
        keep: Complete checkpoints of the run that stay; 0 for all.
        version: The learner's present version.
        calls: State of the training calls, as JSON has it.
    """

    root: str
    name: str
    run_id: str
    keep: int
    version: weights_pb2.WeightVersion
    calls: dict[str, Any]


@dataclass(frozen=True)
class LoadOrder:
    """What is to be loaded.

    Attributes:
        root: Directory of checkpoints.
        name: Name of the checkpoint.
        version: Version that it must hold; unset for any.
    """

    root: str
    name: str
    version: weights_pb2.WeightVersion


def save(ranks: Ranks, models: Sequence[TrainedModel], device: torch.device, order: SaveOrder) -> Manifest:
    """Writes a checkpoint, or returns the manifest of the intact one that holds this version under this name.

    Raises:
        RollwireError: FAILED_PRECONDITION / `ALREADY_EXISTS`, RESOURCE_EXHAUSTED / `STORAGE_FAILED`; on all ranks.
    """
    directory = CheckpointDirectory(Path(order.root))
    known: Manifest | None = None
    with _together(ranks, order.name):
        if ranks.rank == 0:
            known = _existing(directory, order)
    known = ranks.gather(known)[0]
    if known is not None:
        return known
    with ExitStack() as stack:
        with _together(ranks, order.name):
            if ranks.rank == 0:
                stack.enter_context(directory.writing(order.name))
        manifest = _write(ranks, models, device, order, directory)
    if ranks.rank == 0:
        _log.info("checkpoint saved", name=order.name, version=version_text(order.version), bytes=manifest.total_bytes)
    return manifest


def load(
    ranks: Ranks, models: Sequence[TrainedModel], device: torch.device, order: LoadOrder, begin: Callable[[], None]
) -> tuple[Manifest, dict[str, Any]]:
    """Makes the models, optimizers and generators what they were; all checks come before the first change.

    Args:
        ranks: This rank and the others.
        models: What is loaded into.
        device: Device of this rank.
        order: What to load.
        begin: Called right before the first change.

    Returns:
        The manifest, and the state of the training calls.

    Raises:
        RollwireError: NOT_FOUND / `UNKNOWN_CHECKPOINT`, DATA_LOSS / `CHECKPOINT_CORRUPT`, FAILED_PRECONDITION /
            `CHECKPOINT_MISMATCH`; on all ranks.
    """
    directory = CheckpointDirectory(Path(order.root))
    with _together(ranks, order.name):
        manifest = directory.read(order.name)
    with _together(ranks, order.name):
        directory.check(manifest, ranks.rank, ranks.size)
    with _together(ranks, order.name):  # a rank that reads a file has not compared it itself
        state = directory.read_state(order.name)
        if order.version.lineage and order.version != manifest.version:
            raise _mismatch(order.name, f"it holds {version_text(manifest.version)}, not {version_text(order.version)}")
    why = difference(models, state)
    if why:
        raise _mismatch(order.name, why)
    begin()
    tensors: dict[str, Tensor] = {}
    for model in models:
        model.restore_values(state["models"][model.name], state["tensors"])
        tensors |= model.weights() | model.moments()
    with _distributed(ranks) as options:
        reader = HuggingFaceStorageReader(str(directory.path(order.name)))
        try:
            load_tensors(tensors, storage_reader=reader, **options)
        except CheckpointException as error:
            raise corrupt(order.name, "a shard", f"cannot be read ({_first(error)})") from error
    saved = state["generators"]
    restore_generators(saved[ranks.rank % len(saved)], device)
    return manifest, state["calls"]


def _write(
    ranks: Ranks, models: Sequence[TrainedModel], device: torch.device, order: SaveOrder, directory: CheckpointDirectory
) -> Manifest:
    """Writes all files of a checkpoint and completes it."""
    partial = directory.partial(order.name)
    tensors: dict[str, Tensor] = {}
    for model in models:
        tensors |= model.weights() | model.moments()
    with _distributed(ranks) as options:
        writer = HuggingFaceStorageWriter(str(partial), fqn_to_index_mapping=_files(tensors), save_distributed=True)
        try:
            save_tensors(tensors, storage_writer=writer, **options)
        except CheckpointException as error:
            cause = _first(error)
            raise (storage_failed("checkpoint", order.name, cause) if is_refusal(cause) else error) from error
    states = ranks.gather(generators(device))
    values = {model.name: model.values() for model in models}
    names: list[str] | None = None
    with _together(ranks, order.name):
        if ranks.rank == 0:
            state = {
                "models": values,
                "tensors": describe(tensors),
                "generators": states,
                "calls": order.calls,
                "world_size": ranks.size,
                "device": device.type,
            }
            write_state(partial, state)
            names = sorted(path.name for path in partial.iterdir())
    shares: dict[str, Any] = {}
    names = ranks.gather(names)[0]
    with _together(ranks, order.name):
        shares = {file: describe_file(partial / file) for file in names[ranks.rank :: ranks.size]}
    entries = {file: entry for share in ranks.gather(shares) for file, entry in share.items()}
    manifest = new_manifest(order.name, order.run_id, order.version, entries)
    with _together(ranks, order.name):
        if ranks.rank == 0:
            manifest = directory.publish(manifest)
            _prune(directory, order)
    found: Manifest = ranks.gather(manifest)[0]
    return found


def _prune(directory: CheckpointDirectory, order: SaveOrder) -> None:
    """Removes older checkpoints; what cannot be removed does not make the new one a failure."""
    if not order.keep:
        return
    try:
        directory.prune(order.run_id, order.keep, newest=order.name)
    except OSError as error:
        _log.warning("an older checkpoint cannot be removed", directory=order.root, error=str(error))


def _existing(directory: CheckpointDirectory, order: SaveOrder) -> Manifest | None:
    """Returns the checkpoint that is wanted if it is there already and intact; None if it is to be written."""
    path = directory.path(order.name)
    if not path.exists():
        return None
    if not path.is_dir():
        raise _taken(order.name, f"{path} exists and is no directory")
    try:
        manifest = directory.read(order.name)
        if manifest.version == order.version:
            directory.check(manifest)
    except RollwireError as error:
        if error.reason != Reason.CHECKPOINT_CORRUPT:
            raise _taken(order.name, f"{path} exists, and what it holds is not known: {error.message}") from error
        _log.warning("a damaged checkpoint is replaced", name=order.name, damage=error.message)
        return None
    if manifest.version != order.version:
        held = version_text(manifest.version)
        what = f"the checkpoint {order.name} exists and holds {held} instead of {version_text(order.version)}"
        raise _taken(order.name, what, version=held)
    return manifest


def _taken(name: str, what: str, **metadata: str) -> RollwireError:
    return precondition(Reason.ALREADY_EXISTS, f"{what}; choose another name", name=name, **metadata)


@contextmanager
def _together(ranks: Ranks, name: str) -> Iterator[None]:
    """Spans work that may be refused on one rank: then it is refused on all of them, with the same error."""
    problem: RollwireError | None = None
    try:
        yield
    except RollwireError as error:
        problem = error
    except OSError as error:
        problem = storage_failed("checkpoint", name, error)
    ranks.agree(problem)


@contextmanager
def _distributed(ranks: Ranks) -> Iterator[dict[str, Any]]:
    """Yields how torch.distributed.checkpoint is told about the ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one rank needs none
        yield {"no_dist": True} if ranks.size == 1 else {"process_group": ranks.message_group}


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Divides tensors into files, counted from 1, the same on all ranks."""
    numbers, number, size = {}, 1, 0
    for name, tensor in sorted(tensors.items()):
        bytes_here = tensor.numel() * tensor.element_size()
        if size and size + bytes_here > FILE_BYTES:
            number, size = number + 1, 0
        numbers[name] = number
        size += bytes_here
    return numbers


def _first(error: CheckpointException) -> BaseException:
    """Returns the failure of the lowest rank that had one."""
    failures: Any = error.failures
    cause: BaseException = failures[min(failures)][0]
    return cause


def _mismatch(name: str, why: str) -> RollwireError:
    return precondition(
        Reason.CHECKPOINT_MISMATCH, f"checkpoint {name} does not fit: {why}; load one of this model and run", name=name
    )
