"""The ranks of a learner: who they are, how bytes get from one to the others, and how a method runs on all of them.

How to add something that all ranks do: write it as a method of `Trainer` and decorate it with `on_all_ranks`. Called on
rank 0, it runs on every rank with the same arguments, which travel as `codec` says (plain values, arrays, protobuf
messages, dataclasses of Rollwire); the caller gets what rank 0 returns. Inside, every rank must take part in the same
collective operations in the same order; calls from there to other decorated methods are ordinary calls. Use
`Ranks.gather` for what ranks must tell each other and `Ranks.agree` before anything that one rank may have to refuse: a
`RollwireError` must be raised on all ranks or on none and leaves them usable. Any other exception on any rank, and any
rank that dies, ends them all with `RANK_FAILED`, see `rank_watch`. That holds for a single rank whose parameters are
sharded as well: gradients and gathered parameters of work that failed half way cannot be told from those of the next.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, TypeVar, cast

import grpc
import torch
from torch import distributed
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollwire.learner import codec
from rollwire.learner.rank_watch import RankFailure, RankWatch, describe
from rollwire.learner.seats import Seat
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.serving.accelerator import collective_backends
from rollwire.serving.config.sections import LearnerSection
from rollwire.serving.logs import get_logger
from rollwire.serving.server import ServeError

_log = get_logger(__name__)
# Ranks wait for the next command as long as it takes: that rank 0 is alive is what `RankWatch` sees to.
_FOREVER: Final = timedelta(days=3650)
_LOOPBACK: Final = ("127.0.0.1", "localhost")
_MARK: Final = "runs_on_all_ranks"
_P = ParamSpec("_P")
_T = TypeVar("_T")


class InterruptedWorkError(Exception):
    """The server is going away; the work in progress was abandoned."""


@dataclass(frozen=True)
class Meshes:
    """Which ranks share what.

    Attributes:
        data: Ranks that work on different samples and share the parameters between them: one dimension, or two
            (`replicate`, `shard`) when parameters are sharded over fewer ranks than there are.
        tensor: Ranks that work on the same samples and split matrices; None without tensor parallelism.
    """

    data: DeviceMesh
    tensor: DeviceMesh | None


class Ranks:
    """The processes that train together; alone when `size` is 1. Used from one thread.

    Attributes:
        rank: Number of this one; rank 0 serves.
        size: How many there are.
        data_rank: Which share of the samples this rank computes.
        data_size: Number of such shares: `size` divided by the ranks of tensor parallelism.
        meshes: None when there is one rank and nothing is sharded.
        watch: Tells ranks of each other's failures; None when there is one rank.
    """

    def __init__(
        self,
        seat: Seat | None = None,
        tensor_size: int = 1,
        *,
        meshes: Meshes | None = None,
        watch: RankWatch | None = None,
    ) -> None:
        seat = seat or Seat()
        self.rank = seat.rank
        self.size = seat.size
        self.data_rank = seat.rank // tensor_size
        self.data_size = seat.size // tensor_size
        self.meshes = meshes
        self.watch = watch
        self.in_command = False
        self._messages: Any = None
        if self.size > 1:
            # Bytes travel over host memory whatever the device is.
            self._messages = distributed.new_group(backend="gloo", timeout=_FOREVER)

    @property
    def whole(self) -> bool:
        """True if the model is whole on this one rank. Only then is it usable after work that failed half way."""
        return self.size == 1 and self.meshes is None

    @property
    def message_group(self) -> Any:
        """The process group over which bytes travel; None when there is one rank."""
        return self._messages

    def broadcast(self, data: bytes) -> bytes:
        """Returns what rank 0 gave; the others' argument is ignored."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)], dtype=torch.int64)
        distributed.broadcast(length, 0, group=self._messages)
        if not length.item():
            return b""
        content = _as_tensor(data) if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        distributed.broadcast(content, 0, group=self._messages)
        return content.numpy().tobytes()

    def gather(self, value: object) -> list[Any]:
        """Returns the values of all ranks, in their order, on every rank. They travel as `codec` says."""
        if self.size == 1:
            return [value]
        data = codec.encode(value)
        lengths = torch.empty(self.size, dtype=torch.int64)
        distributed.all_gather(
            [lengths[rank : rank + 1] for rank in range(self.size)], torch.tensor([len(data)]), group=self._messages
        )
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: len(data)] = _as_tensor(data)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        distributed.all_gather(parts, padded, group=self._messages)
        ends = lengths.tolist()
        return [codec.decode(part[:end].numpy().tobytes()) for part, end in zip(parts, ends, strict=True)]

    def gather_data(self, value: object) -> list[Any]:
        """Returns one value for each share of the samples, in their order, on every rank."""
        return self.gather(value)[:: self.size // self.data_size]

    def agree(self, problem: RollwireError | None) -> None:
        """Raises the problem of the lowest rank that has one, on every rank."""
        told = None
        if problem is not None:
            told = [problem.code.name, problem.reason, problem.message, problem.metadata, problem.retry_after_s]
        for found in self.gather(told):
            if found is not None:
                raise problem or _error(*found)

    @contextmanager
    def command(self, data: bytes) -> Iterator[None]:
        """Sends a command to the other ranks and spans its execution on this one.

        Raises:
            RollwireError: INTERNAL / `RANK_FAILED` for an error that ends the ranks.
        """
        try:
            self.broadcast(data)
            self.in_command = True
            yield
        except (RollwireError, InterruptedWorkError):
            raise
        except BaseException as error:
            failure = describe(self.rank, error)
            raise rank_failed(failure if self.watch is None else self.watch.judge(failure)) from error
        finally:
            self.in_command = False


def on_all_ranks(method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
    """Makes a method of an object with `ranks` run on all of them; see the top of this module."""

    @functools.wraps(method)
    def run(self: Any, *arguments: _P.args, **named: _P.kwargs) -> _T:
        ranks: Ranks = self.ranks
        if ranks.whole or ranks.in_command:
            return method(self, *arguments, **named)
        with ranks.command(codec.encode([method.__name__, arguments, named]) if ranks.size > 1 else b""):
            return method(self, *arguments, **named)

    run.__dict__[_MARK] = True
    return cast("Callable[Concatenate[Any, _P], _T]", run)


def follow(target: Any) -> NoReturn:
    """Executes what rank 0 commands, on any other rank, until the process is ended by its `RankWatch`.

    Args:
        target: Object whose methods are decorated with `on_all_ranks`.
    """
    ranks: Ranks = target.ranks
    ranks.in_command = True
    while True:
        name, arguments, named = codec.decode(ranks.broadcast(b""))
        method = getattr(type(target), name)
        if not getattr(method, _MARK, False):
            raise TypeError(f"{name} is no command")
        try:
            method(target, *arguments, **named)
        except RollwireError as error:  # rank 0 answers with the same
            _log.info("command refused", command=name, reason=error.reason, message=error.message)


def rank_failed(failure: RankFailure) -> RollwireError:
    """Returns the error of calls that end because a rank has failed."""
    return RollwireError(
        grpc.StatusCode.INTERNAL,
        Reason.RANK_FAILED,
        f"{failure}; the learner ends, start it again",
        metadata={"rank": str(failure.rank)},
    )


def connect(seat: Seat, settings: LearnerSection, device: torch.device, watch: RankWatch | None = None) -> Ranks:
    """Meets the other ranks.

    Args:
        seat: This rank.
        settings: How ranks divide the work.
        device: Device that holds this rank's part of the model.
        watch: Has been started; None for one rank.

    Raises:
        ServeError: The ranks do not fit the settings, or do not come together.
    """
    if seat.size != settings.world_size:
        raise ServeError(
            f"{seat.size} ranks of the learner were started, but learner.world_size is {settings.world_size}; "
            "make them equal"
        )
    if seat.size == 1 and not settings.cpu_offload:
        return Ranks()
    _use_device(seat, device)
    if seat.host in _LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = PrefixStore("group", seat.open_store()) if seat.size > 1 else HashStore()
        distributed.init_process_group(
            collective_backends(device),
            store=store,
            rank=seat.rank,
            world_size=seat.size,
        )
        meshes = _meshes(settings, device)
        return Ranks(seat, settings.tensor_parallel_size, meshes=meshes, watch=watch)
    except (RuntimeError, ValueError) as error:
        cause = describe(seat.rank, error).cause
        raise ServeError(f"the ranks of the learner do not come together ({cause})") from error


def _use_device(seat: Seat, device: torch.device) -> None:
    """Takes the device of this rank."""
    if device.type == "cpu":
        return
    count = torch.accelerator.device_count()
    if seat.local_rank >= count:
        raise ServeError(
            f"rank {seat.rank} needs device {seat.local_rank} of this host, which has {count}; lower "
            "learner.world_size, or start ranks on more hosts with torchrun"
        )
    torch.accelerator.set_device_index(seat.local_rank)


def _meshes(settings: LearnerSection, device: torch.device) -> Meshes:
    """Arranges ranks: those with the same samples are neighbours, then those that share parameters."""
    tensor = settings.tensor_parallel_size
    data = settings.world_size // tensor
    shard = settings.fsdp_size or data
    mesh = init_device_mesh(
        device.type, (data // shard, shard, tensor), mesh_dim_names=("replicate", "shard", "tensor")
    )
    return Meshes(
        data=mesh["replicate", "shard"] if shard < data else mesh["shard"],
        tensor=mesh["tensor"] if tensor > 1 else None,
    )


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _error(
    code: str, reason: str, message: str, metadata: dict[str, str], retry_after_s: float | None
) -> RollwireError:
    return RollwireError(grpc.StatusCode[code], reason, message, metadata=metadata, retry_after_s=retry_after_s)
