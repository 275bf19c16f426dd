"""The rollout server: the section about actor_infer."""

from __future__ import annotations

from typing import Final

from rollwire.cli.import_roll.account import Fate
from rollwire.cli.import_roll.conversion import Conversion
from rollwire.cli.import_roll.optimizer_steps import devices

_INFER: Final = "actor_infer"
_CONFIG: Final = f"{_INFER}.strategy_args.strategy_config"
_VLLM_KEYS: Final = {
    "gpu_memory_utilization": "gpu_memory_utilization",
    "tensor_parallel_size": "tensor_parallel_size",
    "enforce_eager": "enforce_eager",
    "max_num_batched_tokens": "max_batched_tokens",
}
VLLM_IGNORED: Final = {
    "block_size": "vLLM chooses it by device",
    "load_format": "weights always come from the learner, complete and verified, before the first episode",
    "max_model_len": "rollout.max_episode_tokens says it",
    "dtype": "model.dtype says it",
    "enable_prefix_caching": "always on; what other weights computed is never used",
    "sleep_level": "the coordinator decides how deep an engine sleeps",
    "disable_log_stats": "the server has metrics of its own",
}


def map_rollout(conversion: Conversion) -> None:
    """Maps engine and its settings. Sampling is mapped elsewhere."""
    key = f"{_INFER}.strategy_args.strategy_name"
    name = conversion.text(key) or "vllm"
    change = "vLLM where one for the device is installed, else transformers"
    if name != "vllm":
        change = f"{name} is not there; {change}"
    conversion.put("rollout.engine", "auto", key, change=change)
    for roll_name, ours in _VLLM_KEYS.items():
        stated = f"{_CONFIG}.{roll_name}"
        if conversion.value(stated) is not None:
            conversion.put(f"rollout.vllm.{ours}", conversion.value(stated), stated)
    parallel = conversion.settings.get(("rollout", "vllm", "tensor_parallel_size")) or 1
    sequences = f"{_CONFIG}.max_num_seqs"
    running = sequences if conversion.value(sequences) is not None else "max_running_requests"
    conversion.put("rollout.max_concurrent_sequences", conversion.integer(running, 1), running)
    conversion.rest("max_running_requests", Fate.IGNORED, "max_num_seqs says it")
    for roll_name, why in VLLM_IGNORED.items():
        conversion.mark(f"{_CONFIG}.{roll_name}", Fate.IGNORED, why)
    conversion.rest(_CONFIG, Fate.UNSUPPORTED, "rollout.vllm has no such setting")
    _servers(conversion, parallel)


def _servers(conversion: Conversion, parallel: int) -> None:
    """Maps the devices of the engine: whether the learner has the same ones, and how many copies of it they are for."""
    key, train_key = (f"{worker}.device_mapping" for worker in (_INFER, "actor_train"))
    serving, training = set(devices(conversion, _INFER)), set(devices(conversion, "actor_train"))
    reasons = []
    if serving & training and conversion.settings.get(("max_staleness",)) == 0:
        conversion.put("placement", "colocated", key, train_key)
        conversion.put("rollout.vllm.sleep_mode", True, key, train_key)
        if serving != training:
            reasons.append("only a part is shared with actor_train, but all take turns with the learner")
    elif serving & training:
        reasons.append(
            "shared with actor_train: episodes are played while the learner trains, so both must fit on the device "
            "together, see rollout.vllm.gpu_memory_utilization"
        )
    copies = max(1, len(serving) // parallel)
    if copies > 1:
        each = "device" if parallel == 1 else f"{parallel} devices"
        reasons.append(
            f"{copies} engines are {copies} rollout servers, one per {each}; `rollwire launch` starts one, "
            "`rollwire train` takes all under services.rollout"
        )
    if reasons:
        conversion.mark(key, Fate.CHANGED, "; ".join(reasons))
    conversion.rest(key, Fate.IGNORED, "a server takes the devices that it sees when it is started")
