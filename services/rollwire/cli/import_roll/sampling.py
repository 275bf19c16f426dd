"""How tokens are drawn, in training and in validation, and how long a turn and an episode may be."""

from __future__ import annotations

from typing import Final

from rollwire.cli.import_roll.account import Fate
from rollwire.cli.import_roll.conversion import Conversion
from rollwire.cli.import_roll.environments import PlayedTags
from rollwire.cli.import_roll.run import episode_tokens

_SHARED: Final = "actor_infer.generating_args"
_TRAIN: Final = "train_env_manager.generating_args"
_VALIDATION: Final = "val_env_manager.generating_args"
_TURN_DEFAULT: Final = 128
_NEW_TOKENS_DEFAULT: Final = 8192
_TEMPERATURE_DEFAULT: Final = 0.95
_FILTERS: Final = {"top_p": 1.0, "top_k": 0}
# ROLL's own values where a file is silent.
_HIDDEN: Final = {"top_p": 0.7, "top_k": 50}


def map_sampling(conversion: Conversion) -> None:
    """Maps the sampling of training and of validation."""
    training, validation = _sections(conversion)
    key = f"{training}.temperature"
    temperature = _temperature(conversion, training)
    change = "training needs a policy that explores; 0 became 1" if temperature == 0 else ""
    conversion.put("sampling.temperature", temperature or 1.0, key, change=change)
    for name, off in _FILTERS.items():
        _filter(conversion, training, name, off)
    _validation_sampling(conversion, training, validation)


def map_lengths(conversion: Conversion, tags: PlayedTags) -> None:
    """Maps the most tokens of a turn and of an episode.

    Args:
        conversion: The conversion.
        tags: Tags that are trained.
    """
    longest, keys = episode_tokens(conversion)
    conversion.put("rollout.max_episode_tokens", longest, *keys)
    per_tag = {
        f"custom_envs.{tag}.max_tokens_per_step": ("custom_envs", tag, "max_tokens_per_step") for tag in tags.all
    }
    stated = {
        path: conversion.integer(path, 1) if conversion.value(path) is not None else _TURN_DEFAULT
        for path in per_tag.values()
    }
    new_tokens = f"{_sections(conversion)[0]}.max_new_tokens"
    cap = conversion.integer(new_tokens, 1) if conversion.value(new_tokens) is not None else _NEW_TOKENS_DEFAULT
    turn = min(max(stated.values()), cap, longest - 1)
    conversion.put("rollout.max_new_tokens_per_turn", turn, new_tokens, *stated)
    for path, value in stated.items():
        if value != turn:
            why = f"one length for all tags, {turn}, which is also what the prompt states (here it was {value})"
            conversion.mark(path, Fate.CHANGED, why)
    if cap < max(stated.values()):
        why = f"the smaller of a turn's two limits, and what the prompt states; ROLL's states {max(stated.values())}"
        conversion.mark(new_tokens, Fate.CHANGED, why)
    for rest in ("prompt_length", "response_length", "val_prompt_length", "val_sequence_length"):
        if rest not in keys:
            conversion.mark(rest, Fate.IGNORED, "rollout.max_episode_tokens holds for all episodes, prompts included")


def _sections(conversion: Conversion) -> tuple[str, str]:
    """Returns where ROLL reads the sampling of training and of validation; what it overrides is dead."""
    if conversion.has(_SHARED):
        for key in (_TRAIN, _VALIDATION):
            conversion.mark(key, Fate.DEAD, f"{_SHARED} overrides it")
        return _SHARED, _SHARED
    return _TRAIN, _VALIDATION


def _temperature(conversion: Conversion, section: str) -> float:
    key = f"{section}.temperature"
    return _TEMPERATURE_DEFAULT if conversion.value(key) is None else conversion.number(key)


def _filter(conversion: Conversion, section: str, name: str, off: float) -> None:
    key = f"{section}.{name}"
    stated = conversion.value(key)
    if stated is None:
        why = (
            f"ROLL draws with {name} {_HIDDEN[name]} unless told otherwise, and trains a distribution that it never "
            f"drew from; here it is off ({off})"
        )
        conversion.unstated(key, why)
        change = ""
    else:
        # vLLM writes "all tokens" as -1, others as 0.
        change = "" if stated in (off, -1) else _why_unfiltered(stated)
    conversion.put(f"sampling.{name}", off, key, change=change, note="off: what is drawn from is what is trained")


def _why_unfiltered(stated: object) -> str:
    return (
        f"off in training (was {stated}), because the learner scores the unfiltered distribution; validation may "
        "filter (validation.sampling)"
    )


def _validation_sampling(conversion: Conversion, training: str, section: str) -> None:
    conversion.put("validation.sampling.temperature", _temperature(conversion, section), f"{section}.temperature")
    for name, off in _FILTERS.items():
        key = f"{section}.{name}"
        stated = conversion.value(key)
        if stated is not None and stated not in (off, -1):
            value = conversion.number(key) if name == "top_p" else conversion.integer(key)
            conversion.put(f"validation.sampling.{name}", value, key)
        else:
            conversion.used(key)
    length = f"{section}.max_new_tokens"
    if section != training and conversion.value(length) != conversion.value(f"{training}.max_new_tokens"):
        conversion.mark(length, Fate.UNSUPPORTED, "turns of validation are as long as those of training")
    elif section != training:
        conversion.used(length)
