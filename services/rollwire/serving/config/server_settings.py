"""Settings that a server must share with the run that uses it: it acts on them, and no request carries them."""

from __future__ import annotations

import json
from typing import Any, Final

from rollwire.serving.config.models import RunConfig
from rollwire.serving.config.resumable import fixed_schedule

_LEARNER: Final = ("learner.lora", "learner.optimizer", "learner.precision", "model.dtype", "run.deterministic")
_CRITIC: Final = ("learner.critic.optimizer", "learner.critic.warmup_steps")
_SCHEDULE: Final = ("learner.optimizer_steps_per_batch", "run.max_steps")
_ADAPTERS: Final = ("run.seed",)
_ROLLOUT: Final = ("model.dtype", "rollout.system_prompt", "rollout.turn_template", "run.deterministic")


def learner_settings(config: RunConfig) -> dict[str, str]:
    """Returns the settings that a learner with this configuration acts on, by their full key, as JSON."""
    names = (
        *_LEARNER,
        *(_CRITIC if config.needs_critic else ()),
        *(_SCHEDULE if fixed_schedule(config) else ()),
        *(_ADAPTERS if config.learner.lora.rank else ()),
    )
    return _encoded(config, names)


def rollout_settings(config: RunConfig) -> dict[str, str]:
    """Returns the settings that a rollout server with this configuration acts on, by their full key, as JSON."""
    return _encoded(config, _ROLLOUT)


def differences(server: dict[str, str], run: dict[str, str]) -> list[tuple[str, str, str]]:
    """Compares what a server says with what a run says.

    Returns:
        Key, the server's value and the run's, for each key that both have with different values. What only one of them
        has is of another build, or of a part that the run does not use.
    """
    return [(key, server[key], run[key]) for key in sorted(server.keys() & run.keys()) if server[key] != run[key]]


def _encoded(config: RunConfig, names: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        value: Any = config.model_dump(mode="json")
        for part in name.split("."):
            value = value[part]
        inner = {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        found.update({key: json.dumps(one, sort_keys=True) for key, one in inner.items()})
    return found
