"""How many optimizer steps ROLL makes of one batch, from devices, micro-batch and gradient accumulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rollwire.cli.import_roll.conversion import Conversion, Key
from rollwire.cli.import_roll.devices import device_list

_SPLITS: Final = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
BATCH_KEYS: Final = ("per_device_train_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True)
class OptimizerSteps:
    """Division of a batch.

    Attributes:
        count: Optimizer steps.
        episodes: Episodes of one of them in ROLL.
        exact: Whether they divide the batch.
    """

    count: int
    episodes: int
    exact: bool


def optimizer_steps(conversion: Conversion, worker: str) -> OptimizerSteps:
    """Returns how a batch is divided: ROLL's backward steps per rank, of one epoch.

    Args:
        conversion: The conversion.
        worker: `actor_train` or `critic`.
    """
    ranks = max(1, len(devices(conversion, worker)) // _copies(conversion, worker))
    micro, accumulated = (conversion.integer(f"{worker}.training_args.{key}", 1) for key in BATCH_KEYS)
    batch, episodes = conversion.integer("rollout_batch_size", 1), micro * accumulated * ranks
    return OptimizerSteps(max(1, -(-batch // episodes)), episodes, batch % episodes == 0)


def devices(conversion: Conversion, worker: str) -> list[int]:
    """Returns the devices of a worker; none means the CPU.

    Raises:
        ConfigError: The mapping is no list of devices.
    """
    key = f"{worker}.device_mapping"
    mapping = conversion.value(key)
    if mapping is None:
        return []
    try:
        return device_list(mapping)
    except ValueError as error:
        raise conversion.refused(key, "a list of devices such as list(range(0,8)) or [0, 1]") from error


def _copies(conversion: Conversion, worker: str) -> int:
    """Returns how many devices work on the same samples."""
    keys: list[Key] = [f"{worker}.strategy_args.strategy_config.{name}" for name in _SPLITS]
    keys.append(f"{worker}.model_args.ulysses_size")
    product = 1
    for key in keys:
        product *= 1 if conversion.value(key) is None else conversion.integer(key, 1)
    return product
