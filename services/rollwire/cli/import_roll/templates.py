"""What the files say that ROLL's configurations include, for a file that is imported without them.

Only what a conversion needs, as facts: names, types and options of the environments, and the variables that they read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from rollwire.environment.answers import ANSWER_PATTERN, THINK_PATTERN
from rollwire.rollout.prompts import SYSTEM_TEMPLATE, TURN_TEMPLATE

_MANAGERS: Final = "roll.pipeline.agentic.env_manager"
_VARIABLES: Final = {
    "all_response_pattern": "^(.*)$",
    "action_pattern": ANSWER_PATTERN,
    "think_action_pattern": THINK_PATTERN,
    "max_tokens_per_step": 128,
    "max_actions_per_traj": 10,
    "frozen_format_penalty": -0.01,
    "agent_system_template": SYSTEM_TEMPLATE,
}
_SOKOBANS: Final[Mapping[str, Mapping[str, Any]]] = {
    "SimpleSokoban": {"dim_room": [6, 6], "num_boxes": 1},
    "LargerSokoban": {"dim_room": [10, 10], "num_boxes": 2, "search_depth": 10},
    "SokobanDifferentGridVocab": {
        "dim_room": [6, 6],
        "num_boxes": 1,
        "search_depth": 30,
        "grid_lookup": dict(enumerate("W.GCBA@")),
    },
}
# The prompt of one turn of StepEnvManager is not Rollwire's; what matters are the fields that it fills in.
_STEP_TEMPLATE: Final = (
    "{env_instruction} {step_count} {history_length} {history} {current_step} {current_observation} "
    "{max_response_length}"
)


def known_contents(name: str) -> dict[str, Any]:
    """Returns what the file of this name in ROLL's `examples/config` says. Raises `KeyError`."""
    return KNOWN_CONTENTS[name]()


def _trajectory_environments() -> dict[str, Any]:
    return {
        **_VARIABLES,
        "sokoban_format_penalty": -0.15,
        "env_manager_cls": f"{_MANAGERS}.traj_env_manager.TrajEnvManager",
        "agent_template": TURN_TEMPLATE,
        "custom_env": _environments({}),
    }


def _step_environments() -> dict[str, Any]:
    return {
        **_VARIABLES,
        "sokoban_format_penalty": -0.05,
        "env_manager_cls": f"{_MANAGERS}.step_env_manager.StepEnvManager",
        "default_history_length": 5,
        "agent_template": _STEP_TEMPLATE,
        "custom_env": _environments({"history_length": "${default_history_length}"}),
    }


def _environments(more: Mapping[str, Any]) -> dict[str, Any]:
    sokoban = {"action_pattern": "${action_pattern}", "format_penalty": "${sokoban_format_penalty}"}
    lake = {"format_penalty": "${frozen_format_penalty}", "is_slippery": False}
    return {
        **{tag: _entry("sokoban", {**sokoban, **room}, more) for tag, room in _SOKOBANS.items()},
        "FrozenLake": _entry("frozen_lake", {"action_pattern": "${action_pattern}", **lake}, more),
        "FrozenLakeThink": _entry("frozen_lake", {"action_pattern": "${think_action_pattern}", **lake}, more),
        "WebShopEnv": _entry("webshop", {"observation_mode": "text", "format_penalty": -0.05}, more),
    }


def _entry(env_type: str, options: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "env_type": env_type,
        "max_steps": "${max_actions_per_traj}",
        "max_tokens_per_step": "${max_tokens_per_step}",
        "env_manager_cls": "${env_manager_cls}",
        "use_thread_lock": True,
        **more,
        "agent_system_template": "${agent_system_template}",
        "agent_template": "${agent_template}",
        "env_config": {"max_steps": "${max_actions_per_traj}", **options},
    }


def _deepspeed(name: str, stage: int) -> Callable[[], dict[str, Any]]:
    return lambda: {name: {"zero_optimization": {"stage": stage}}}


KNOWN_CONTENTS: Final[Mapping[str, Callable[[], dict[str, Any]]]] = {
    "traj_envs": _trajectory_environments,
    "step_envs": _step_environments,
    "deepspeed_zero": _deepspeed("deepspeed_zero", 0),
    "deepspeed_zero2": _deepspeed("deepspeed_zero2", 2),
    "deepspeed_zero3": _deepspeed("deepspeed_zero3", 3),
    "deepspeed_zero3_cpuoffload": _deepspeed("deepspeed_zero3_cpuoffload", 3),
}
"""By the name of the file without its suffix."""
