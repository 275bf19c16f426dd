"""Which settings a run may change when it is resumed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from rollwire.serving.config.loader import ConfigError
from rollwire.serving.config.models import RunConfig

HARMLESS: Final = (
    "coordinator",
    "environment.disable_after_failures",
    "environment.max_sessions",
    "environment.providers",
    "placement",
    "rollout.http",
    "rollout.same_host_weights",
    "run.checkpoint_every_steps",
    "run.keep_checkpoints",
    "run.max_steps",
    "services",
    "timeouts",
    "tracking.text_samples_every_steps",
    "validation.every_steps",
    "validation.greedy_at_end",
)
"""Settings, or sections of them, that change neither weights nor episodes."""

ROUNDING: Final = (
    "device",
    "learner.cpu_offload",
    "learner.fsdp_size",
    "learner.gradient_checkpointing",
    "learner.micro_batch_tokens",
    "learner.packing",
    "learner.sharding",
    "learner.tensor_parallel_size",
    "learner.torch_threads",
    "learner.world_size",
    "rollout.max_concurrent_sequences",
    "rollout.max_episodes",
    "rollout.torch_threads",
    "rollout.vllm",
)
"""Settings that change results by rounding alone: with them the run goes on in a new lineage."""


@dataclass(frozen=True)
class ResumedConfig:
    """The configuration that a run goes on with.

    Attributes:
        config: The configuration.
        exact: True if what follows can be bit for bit what would have followed.
    """

    config: RunConfig
    exact: bool


def resumed_config(stored: RunConfig, wanted: RunConfig) -> ResumedConfig:
    """Compares what is wanted with what a run was started with.

    Raises:
        ConfigError: A setting differs that a run keeps.
    """
    before, after = _flat(stored.model_dump(mode="json")), _flat(wanted.model_dump(mode="json"))
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    refused = [key for key in changed if not _in(key, HARMLESS + ROUNDING)]
    if refused:
        raise ConfigError(
            "\n".join(
                f"{key} is {after.get(key)!r}, but the run was started with {before.get(key)!r}; a resumed run keeps "
                f"it. May be changed: {', '.join(sorted(HARMLESS + ROUNDING))}"
                for key in refused
            )
        )
    rounding = [key for key in changed if _in(key, ROUNDING)]
    if rounding and stored.run.deterministic:
        raise ConfigError(
            f"{rounding[0]} is {after[rounding[0]]!r}, but the run was started with {before[rounding[0]]!r} and with "
            "run.deterministic=true: it would not go on bit for bit; leave the setting as it was"
        )
    _check_schedules(stored, wanted)
    return ResumedConfig(wanted, exact=not rounding)


def _check_schedules(stored: RunConfig, wanted: RunConfig) -> None:
    schedule = fixed_schedule(stored)
    if stored.run.max_steps != wanted.run.max_steps and schedule is not None:
        raise ConfigError(
            f"run.max_steps is {wanted.run.max_steps}, but the run was started with {stored.run.max_steps}, which "
            f"{schedule} is laid out for; a resumed run keeps it. To train further, start a new run from what this one "
            "exported, with model.path=… its directory"
        )


def fixed_schedule(config: RunConfig) -> str | None:
    """Returns the setting of a learning-rate schedule that fixes the length of the run; None if there is none."""
    for name, section in (
        ("optimizer", config.learner.optimizer),
        ("critic.optimizer", config.learner.critic.optimizer),
    ):
        used = name == "optimizer" or config.needs_critic
        if used and section.schedule != "constant":
            return f"learner.{name}.schedule={section.schedule}"
    return None


def _in(key: str, known: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in known)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested sections by their full key; lists and free dictionaries are values."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found.update(_flat(inner, f"{prefix}.{key}" if prefix else str(key)))
    return found
