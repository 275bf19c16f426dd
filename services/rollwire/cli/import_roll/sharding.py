"""Training strategy and devices: how the learner's ranks share the model."""

from __future__ import annotations

from typing import Final

from rollwire.cli.import_roll.account import Fate
from rollwire.cli.import_roll.conversion import Conversion
from rollwire.cli.import_roll.optimizer_steps import devices

_TRAIN: Final = "actor_train"
_CONFIG: Final = f"{_TRAIN}.strategy_args.strategy_config"
_STRATEGIES: Final = ("fsdp2_train", "megatron_train", "deepspeed_train")
_TENSOR_PARALLEL: Final = "tensor_model_parallel_size"
_OFFLOAD: Final = "offload_policy"
# Settings of FSDP2 that Rollwire leaves no choice about.
FSDP_IGNORED: Final = {
    "async_save_ckpt": "checkpoints are complete or not there",
    "save_only_model": "a checkpoint is what training goes on from; an export holds the model alone",
    "reduce_scatter_during_grad_accumulation": "gradients are reduced once per optimizer step",
}
MEGATRON_IGNORED: Final = {
    "use_distributed_optimizer": "masters, gradients and moments are always sharded",
    "recompute_granularity": "learner.gradient_checkpointing says whether activations are computed again",
}


def map_sharding(conversion: Conversion) -> None:
    """Maps `strategy_args` and `device_mapping` of actor_train."""
    name_key = f"{_TRAIN}.strategy_args.strategy_name"
    name = conversion.text(name_key) or _STRATEGIES[0]
    key = f"{_TRAIN}.device_mapping"
    ranks = max(1, len(devices(conversion, _TRAIN)))
    conversion.put("learner.world_size", ranks, key)
    if name == _STRATEGIES[0]:
        conversion.used(name_key)
        _fsdp(conversion, ranks)
    else:
        conversion.mark(name_key, Fate.CHANGED, "the learner shards with FSDP2; zero3 is nearest in memory")
        conversion.put("learner.sharding", "zero3", name_key)
        if name == _STRATEGIES[1]:
            _megatron(conversion, ranks)
    conversion.rest(_CONFIG, Fate.IGNORED, f"a setting of {name}; the learner shards with FSDP2")


def _fsdp(conversion: Conversion, ranks: int) -> None:
    reshard = f"{_CONFIG}.reshard_after_forward"
    conversion.put("learner.sharding", "zero3" if conversion.flag(reshard, default=True) else "zero2", reshard)
    size_key = f"{_CONFIG}.fsdp_size"
    size = 1 if conversion.value(size_key) is None else conversion.integer(size_key, -1)
    whole = size <= 1 or size >= ranks
    if not whole and ranks % size:
        raise conversion.refused(size_key, f"a divisor of the {ranks} devices of {_TRAIN}")
    conversion.put("learner.fsdp_size", 0 if whole else size, size_key)
    offload = f"{_CONFIG}.{_OFFLOAD}"
    conversion.put("learner.cpu_offload", conversion.flag(offload), offload)
    _types(conversion)
    for name, why in FSDP_IGNORED.items():
        conversion.mark(f"{_CONFIG}.{name}", Fate.IGNORED, why)
    conversion.mark(f"{_CONFIG}.use_batched_model_update", Fate.DEAD, "no code of ROLL's mentions it")


def _types(conversion: Conversion) -> None:
    types = {
        "param_dtype": "the forward pass computes in learner.precision",
        "reduce_dtype": "gradients are reduced in float32",
    }
    same = {"param_dtype": conversion.value(f"{_TRAIN}.model_args.dtype"), "reduce_dtype": "fp32"}
    for name, why in types.items():
        key = f"{_CONFIG}.{name}"
        stated = conversion.value(key)
        if stated is None or stated == same[name]:
            conversion.used(key)
        else:
            conversion.mark(key, Fate.CHANGED, f"{why}, whatever this says")


def _megatron(conversion: Conversion, ranks: int) -> None:
    key = f"{_CONFIG}.{_TENSOR_PARALLEL}"
    size = 1 if conversion.value(key) is None else conversion.integer(key, 1)
    if ranks % size:
        raise conversion.refused(key, f"a divisor of the {ranks} devices of {_TRAIN}")
    conversion.put("learner.tensor_parallel_size", size, key)
    for name in ("pipeline_model_parallel_size", "expert_model_parallel_size", "context_parallel_size"):
        split = f"{_CONFIG}.{name}"
        if conversion.value(split) in (None, 1):
            conversion.used(split)
        else:
            conversion.mark(split, Fate.UNSUPPORTED, "ranks share parameters and split matrices, nothing else")
    for name, why in MEGATRON_IGNORED.items():
        conversion.mark(f"{_CONFIG}.{name}", Fate.IGNORED, why)
