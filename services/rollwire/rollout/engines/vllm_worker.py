"""What runs inside vLLM's worker processes: loading weights from a mapped file, and reading them back.

vLLM mixes `RolloutWorker` into its worker class (`worker_extension_cls`) before the model is made; every method is
called through `collective_rpc`, between engine steps, on every rank. Names begin with `rl_` because vLLM refuses to
overwrite what a worker has. Written for vLLM 0.23 to 0.32.
"""

from __future__ import annotations

import atexit
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from vllm.model_executor.layers import utils as linear_layers
from vllm.platforms import current_platform

from rollwire.rollout.engines.expert_names import split_experts
from rollwire.rollout.engines.vllm_settings import LOGPROBS_MODE, OWNER_VARIABLE
from rollwire.rollout.engines.weight_copies import CopyWatch, MappedWeights, Parts, read_back
from rollwire.rollout.engines.weight_stage import CannotStageError, WeightStage
from rollwire.rollout.host_file import FileEntry

# Weights with these methods are used as they are loaded, but for the CPU's packed copies.
_PLAIN_METHODS: Final = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
# Attributes made of loaded weights: products of latent attention, a copy of another type.
_PRODUCTS: Final = ("W_UV", "W_UK_T", "weight_fp32")
_NOT_ON_CPU: Final = (
    "{} is packed on the CPU in a way that cannot be updated; use rollout.engine=transformers for this architecture"
)
_PACKED: Final = "cpu_linear"
_END_S: Final = 5.0
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 -- not a temporary file
# As vLLM's CPU communicator names it.
_COMPUTED_IN: Final = re.compile(r"-cpushm_\d+$")
pack_linear = linear_layers.dispatch_cpu_unquantized_gemm


class RolloutWorker:
    """Methods that vLLM's worker gains; `self` is the worker."""

    device: torch.device
    model_runner: Any
    vllm_config: Any

    def rl_prepare(self) -> dict[str, Any]:
        """Sets what vLLM's arguments cannot, once after the start.

        Returns:
            `logprobs_mode` in effect. `reload`: the model computes with something else than the loaded weights.

        Raises:
            ValueError: The model's weights cannot be updated on this device.
        """
        if self.vllm_config.parallel_config.world_size == 1:
            atexit.register(_leave)
        elif current_platform.is_cpu():
            _remove_shared_names()
        processed = processed_layers(self.model_runner.model)
        if processed and current_platform.is_cpu():
            raise ValueError(_NOT_ON_CPU.format(f"the weight of {processed[0]}"))
        self.rl_reload = bool(processed)
        self.rl_parts: Parts = {}
        self.rl_transformed: set[str] = set()
        self.rl_spare: dict[int, torch.Tensor] = {}
        self.rl_drop()
        # vllm-ascend makes its sampler without arguments and so ignores the engine's `logprobs_mode`.
        sampler = self.model_runner.sampler
        sampler.logprobs_mode = LOGPROBS_MODE
        filters = getattr(sampler, "topk_topp_sampler", None)  # vLLM's second model runner has none
        if filters is not None:
            filters.logprobs_mode = LOGPROBS_MODE
            if current_platform.is_cpu() and not hasattr(torch.ops._C, "fused_gumbel_argmax"):
                # The CPU path draws noise for all rows and then again for the seeded ones, which all of ours are;
                # before 0.29 it even ignored the seeds of a batch in which one row had none, as greedy rows do.
                filters.forward = filters.forward_native
        return {"logprobs_mode": sampler.logprobs_mode, "reload": self.rl_reload}

    def rl_free_bytes(self) -> int:
        """Returns the memory of this rank's device that nobody uses; 0 on CPU."""
        if current_platform.is_cpu():
            return 0
        return int(torch.get_device_module(self.device).mem_get_info()[0])

    def rl_load(self, path: str, entries: list[list[Any]], aliases: dict[str, str], complete: bool) -> dict[str, Any]:
        """Overwrites the model's weights with those of a file, and compares what is held then bit for bit.

        Args:
            path: `HostFile.path`.
            entries: The file's entries as lists.
            aliases: Additional checkpoint names of tied tensors: alias to name in the file.
            complete: True if the file has every tensor of the model, so that none may keep an old value.

        Returns:
            `held`: number of elements of each tensor, by name, that this rank holds and has compared.
            `differing`: names of tensors that are not bit for bit what was sent. `transformed`: names of tensors that
            the model's loader computed with, so that they cannot be compared. `stale`: parameters that nothing wrote.
        """
        source = MappedWeights(path, [FileEntry(*entry) for entry in entries])
        model = self.model_runner.model
        watch = CopyWatch(source)
        named = [(name, source.tensors[name]) for name in source.tensors]
        # A tied tensor that this version of vLLM made twice must be sent twice; loaders refuse names they do not have.
        made = {name for name, _ in model.named_parameters()}
        named += [
            (alias, source.tensors[name]) for alias, name in aliases.items() if alias in made and name in source.tensors
        ]
        with watch, torch.no_grad():
            if self.rl_reload:
                self.model_runner.reload_weights(weights_iterator=split_experts(named))
            else:
                model.load_weights(iter(named))
        if self.rl_reload:
            # The layers were rebuilt and processed after the copies: what these wrote to is gone.
            return {"held": {}, "differing": [], "transformed": list(source.tensors), "stale": []}
        pack(model, {id(parameter) for parameter in watch.touched(model.parameters())})
        self.rl_drop()
        self.rl_parts = watch.parts if complete else self.rl_parts | watch.parts
        self.rl_transformed = watch.transformed if complete else self.rl_transformed | watch.transformed
        return {
            "held": watch.held(),
            "differing": watch.differing(),
            "transformed": sorted(watch.transformed),
            "stale": watch.unwritten(model.named_parameters()) if complete else [],
        }

    def rl_read_back(self, path: str, entries: list[list[Any]]) -> None:
        """Writes what this rank holds into a file, in the checkpoint's layout."""
        read_back(self.rl_parts, MappedWeights(path, [FileEntry(*entry) for entry in entries], writable=True))

    def rl_stage(self, path: str, entries: list[list[Any]], complete: bool) -> None:
        """Begins to make a second set of weights from a file, beside the set that computes.

        Args:
            path: `HostFile.path`.
            entries: The file's entries as lists.
            complete: As for `rl_load`.
        """
        self.rl_drop()
        source = MappedWeights(path, [FileEntry(*entry) for entry in entries])
        self.rl_second: Any = WeightStage(
            self.model_runner.model, self.rl_parts, self.rl_spare, complete=complete, packed=_PACKED, pack=_packed
        )
        self.rl_steps: Iterator[None] = self.rl_second.fill(source, self.rl_transformed)

    def rl_stage_some(self, seconds: float) -> dict[str, Any]:
        """Goes on for about `seconds`, so that generation waits for no longer than that.

        Returns:
            `done`: the second set is complete. `differing`: as for `rl_load`. `refused`: why this model cannot be
            updated like that, else empty.
        """
        end = time.monotonic() + seconds
        try:
            for _ in self.rl_steps:
                if time.monotonic() >= end:
                    return {"done": False, "differing": [], "refused": ""}
        except CannotStageError as error:
            self.rl_drop()
            return {"done": True, "differing": [], "refused": str(error)}
        return {"done": True, "differing": self.rl_second.differing, "refused": ""}

    def rl_flip(self) -> None:
        """Puts the second set in place of the first.

        Raises:
            ValueError: The second set is not complete, or not what was sent.
        """
        if self.rl_second is None or next(self.rl_steps, self) is not self or self.rl_second.differing:
            raise ValueError("there is no complete second set of weights")
        self.rl_parts = self.rl_second.flip()
        self.rl_drop()

    def rl_drop(self) -> None:
        """Gives a second set up that was not put in place."""
        self.rl_second = None
        self.rl_steps = iter(())


def processed_layers(model: torch.nn.Module) -> list[str]:
    """Returns the names of layers that compute with something else than the weights that were loaded into them.

    The weights of experts are permuted or packed, quantised ones converted, and latent attention keeps products of
    some. Copied into such layers, the tensors of a checkpoint give nonsense, without an error.
    """
    return [
        name
        for name, module in model.named_modules()
        if not type(getattr(module, "quant_method", None)).__name__.endswith((*_PLAIN_METHODS, "NoneType"))
        # vllm-ascend keeps them in the layer's implementation, which is not a module.
        or any(hasattr(place, name) for place in (module, getattr(module, "impl", None)) for name in _PRODUCTS)
    ]


def pack(model: torch.nn.Module, touched: set[int]) -> None:
    """Renews the packed copies of weights, given by id; nothing to do on devices that have none."""
    for module in model.modules():
        if hasattr(module, _PACKED) and id(module.weight) in touched:
            pack_linear(module, remove_weight=False)


def _packed(module: torch.nn.Module, weight: torch.Tensor) -> object:
    """Packs a weight that is not in the module yet; returns what `pack_linear` would give the module."""
    stand_in = torch.nn.Module()
    stand_in.weight = torch.nn.Parameter(weight, requires_grad=False)
    pack_linear(stand_in, remove_weight=False)
    return getattr(stand_in, _PACKED)


def _pack_and_keep(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Packs a weight for the CPU's kernels and keeps the original, which later loads write to.

    vLLM removes the original, and an update in place then fails or, for a head tied to the embedding, changes the
    embedding but not the packed head.
    """
    weight: Any = layer.weight
    if weight.ndim != 2 and not weight.is_meta:
        raise ValueError(_NOT_ON_CPU.format(f"a weight of shape {list(weight.shape)}"))
    pack_linear(layer, remove_weight=False)


def _end_with(owner_pid: int) -> None:
    """Ends this process when the owner has ended, however it did: as vLLM would end it, and if need be at once."""
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        poll = select.poll()
        poll.register(owner, select.POLLIN)
        poll.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_END_S)
        os._exit(1)

    threading.Thread(target=wait, name="rollwire-owner-watch", daemon=True).start()


def _remove_shared_names() -> None:
    """Removes the names of the memory that ranks compute in: all have mapped it, and a killed rank would leave them."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.parent == _SHARED_MEMORY and _COMPUTED_IN.search(path.name):
            path.unlink(missing_ok=True)


def _leave() -> None:
    """Ends the process when vLLM has shut down: taking the interpreter apart takes seconds and frees nothing more.

    Except where ranks have queues in shared memory, whose names only destructors remove.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if OWNER_VARIABLE in os.environ:
    # Imported by vLLM in a worker process, before the model is made.
    _end_with(int(os.environ[OWNER_VARIABLE]))
    if current_platform.is_cpu():
        linear_layers.dispatch_cpu_unquantized_gemm = _pack_and_keep
