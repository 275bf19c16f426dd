"""Which environments are played, with which options and prompts, in training and in validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollwire.cli.import_roll.account import Fate, dotted
from rollwire.cli.import_roll.conversion import Conversion
from rollwire.serving.config import ConfigError

FROZEN_LAKE_OPTIONS: Final[Mapping[str, Any]] = {
    "size": 4,
    "p": 0.8,
    "is_slippery": True,
    "max_steps": 20,
    "format_penalty": 0.0,
    "action_pattern": None,
    "special_token_list": None,
    "env_instruction": None,
}
"""Options with what ROLL's constructor takes where they are not set; None where Rollwire's default is the same."""

SOKOBAN_OPTIONS: Final[Mapping[str, Any]] = {
    "dim_room": None,
    "num_boxes": None,
    "max_steps": 100,
    "search_depth": None,
    "format_penalty": None,
    "action_pattern": None,
    "special_token_list": None,
    "env_instruction": None,
}
"""The same for Sokoban."""

ENVIRONMENTS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "frozen_lake": ("FrozenLake", FROZEN_LAKE_OPTIONS),
    "sokoban": ("Sokoban", SOKOBAN_OPTIONS),
}
"""By ROLL's `env_type`: Rollwire's type and the options that it takes."""

_GEM_PREFIXES: Final = ("game:", "rg:", "math:", "code:", "logic:", "qa:", "eval:")
_CELLS: Final = 7
"""Kinds of cells that Sokoban has symbols for."""


@dataclass(frozen=True)
class PlayedTags:
    """Tags that can be played.

    Attributes:
        train: Tags of training, each with its share of groups.
        validation: Tags of validation, each with its share; some may not be trained.
    """

    train: Mapping[str, int]
    validation: Mapping[str, int]

    @property
    def all(self) -> Sequence[str]:
        """Tags of training, then those that only validation plays."""
        return list(dict.fromkeys([*self.train, *self.validation]))


def map_environments(conversion: Conversion) -> PlayedTags:
    """Maps tags, their shares and their definitions.

    Raises:
        ConfigError: No tag of training can be played, or one is not defined.
    """
    wanted = _shares(conversion, "train_env_manager")
    train = {tag: share for tag, share in wanted.items() if is_playable(conversion, tag)}
    if not train:
        types = ", ".join(f"{tag} (env_type {_env_type(conversion, tag)})" for tag in wanted)
        raise ConfigError(
            f"{conversion.file.name}: none of the tags in train_env_manager.tags can be played: {types}; Rollwire has "
            f"{', '.join(ENVIRONMENTS)}, ids of GEM, and your own environments as docs/environments.md says"
        )
    _missing(conversion, "train_env_manager", wanted)
    validated: Mapping[str, int] = {}
    if conversion.has("val_env_manager.tags") and conversion.integer("eval_steps", -1) > 0:
        validated = _shares(conversion, "val_env_manager")
    tags = PlayedTags(train, {tag: share for tag, share in validated.items() if is_playable(conversion, tag)})
    keys = ["train_env_manager.tags", "train_env_manager.num_groups_partition"]
    single = len(train) == 1
    entries: list[dict[str, Any]] = [
        {"tag": tag} if single else {"tag": tag, "weight": float(share)} for tag, share in train.items()
    ]
    only_validated = [{"tag": tag, "weight": 0.0} for tag in tags.all if tag not in train]
    conversion.put("environments", entries + only_validated, *keys, *["val_env_manager.tags"] * bool(only_validated))
    for tag in tags.all:
        _define(conversion, tag)
    for tag in conversion.tree.children(("custom_envs",)):
        if tag not in tags.all:
            conversion.mark(("custom_envs", tag), Fate.IGNORED, "no group plays this tag")
    return tags


def _shares(conversion: Conversion, manager: str) -> dict[str, int]:
    """Returns the tags with their groups; equal shares where the two lists do not fit."""
    tags = conversion.value(f"{manager}.tags")
    if not isinstance(tags, list) or not tags or not all(isinstance(tag, str) for tag in tags):
        raise conversion.refused(f"{manager}.tags", "a list of tags that custom_envs defines")
    key = f"{manager}.num_groups_partition"
    partition = conversion.value(key)
    fits = isinstance(partition, list) and len(partition) == len(tags)
    if not fits or not all(isinstance(share, int) and share > 0 for share in partition):
        conversion.mark(
            key, Fate.CHANGED, f"does not give each of the {len(tags)} tags a number of groups: equal shares"
        )
        partition = [1] * len(tags)
    shares: dict[str, int] = {}
    for tag, share in zip(tags, partition, strict=True):
        shares[tag] = shares.get(tag, 0) + share
    return shares


def _env_type(conversion: Conversion, tag: str) -> str | None:
    path = ("custom_envs", tag)
    if not conversion.has(path):
        raise ConfigError(f"{conversion.file.name}: the tag {tag!r} is played, but custom_envs does not define it")
    return conversion.text((*path, "env_type"))


def is_playable(conversion: Conversion, tag: str) -> bool:
    """Tells whether Rollwire has the environment of a tag. Raises `ConfigError` when the tag is not defined."""
    kind = _env_type(conversion, tag) or ""
    return kind in ENVIRONMENTS or kind.startswith(_GEM_PREFIXES)


def _missing(conversion: Conversion, manager: str, wanted: Mapping[str, int]) -> None:
    """Accounts for the tags of a manager that have no environment here."""
    missing = [tag for tag in wanted if not is_playable(conversion, tag)]
    if missing:
        why = f"{describe(conversion, missing)}; the other tags take over their groups"
        for key in ("tags", "num_groups_partition"):
            conversion.mark(f"{manager}.{key}", Fate.UNSUPPORTED, why)


def describe(conversion: Conversion, tags: Sequence[str]) -> str:
    """Returns why tags cannot be played."""
    by_type: dict[str, list[str]] = {}
    for tag in tags:
        by_type.setdefault(_env_type(conversion, tag) or "?", []).append(tag)
    return ", ".join(f"{' and '.join(found)}: env_type {kind} is not in Rollwire" for kind, found in by_type.items())


def _define(conversion: Conversion, tag: str) -> None:
    """Maps the definition of one tag that is played."""
    entry = ("custom_envs", tag)
    target = ("environment", "definitions", tag)
    if _env_type(conversion, tag) not in ENVIRONMENTS:
        _define_gem(conversion, tag)
        return
    kind, options = ENVIRONMENTS[_env_type(conversion, tag) or ""]
    conversion.put((*target, "type"), kind, (*entry, "env_type"))
    for name, default in options.items():
        key = (*entry, "env_config", name)
        if name == "max_steps":
            _turn_limit(conversion, tag, "max_steps", default)
            continue
        value = conversion.value(key)
        value = default if value is None else value
        if value is not None:
            conversion.put((*target, "options", name), value, key)
    if kind == "Sokoban":
        _symbols(conversion, tag)
    conversion.rest((*entry, "env_config"), Fate.UNSUPPORTED, f"{kind} has no such option")


def _define_gem(conversion: Conversion, tag: str) -> None:
    """Maps a tag whose env_type is an id of GEM: what it is configured with goes to GEM as it is."""
    entry = ("custom_envs", tag)
    target = ("environment", "definitions", tag)
    conversion.put((*target, "type"), "gem", (*entry, "env_type"))
    conversion.put((*target, "options", "id"), _env_type(conversion, tag), (*entry, "env_type"))
    _turn_limit(conversion, tag, "max_turns", None)
    kwargs = {
        name: conversion.value((*entry, "env_config", name))
        for name in conversion.tree.children((*entry, "env_config"))
        if name not in ("max_steps", "seed", "map_seed", "render_mode")
    }
    if kwargs:
        conversion.put((*target, "options", "kwargs"), kwargs, note=f"{dotted(entry)}.env_config")
        conversion.pairs.add((f"{dotted(entry)}.env_config", f"{dotted(target)}.options.kwargs"))
        conversion.used(*[(*entry, "env_config", name) for name in kwargs])


def _symbols(conversion: Conversion, tag: str) -> None:
    """Maps Sokoban's table of symbols, ROLL's from 0 to 6."""
    key = ("custom_envs", tag, "env_config", "grid_lookup")
    if conversion.has(key):
        symbols = [conversion.value((*key, str(cell))) for cell in range(_CELLS)]
        if not all(isinstance(symbol, str) and len(symbol) == 1 for symbol in symbols):
            raise ConfigError(
                f"{conversion.file.name}: {dotted(key)} gives the symbols {symbols}; allowed: one character for each "
                f"of 0 to {_CELLS - 1}"
            )
        conversion.put(("environment", "definitions", tag, "options", "symbols"), "".join(symbols), key)
    conversion.mark(
        ("custom_envs", tag, "env_config", "grid_vocab"),
        Fate.IGNORED,
        "the instructions explain the symbols of options",
    )


def _turn_limit(conversion: Conversion, tag: str, option: str, default: int | None) -> None:
    """Maps the most turns: the environment's, which ROLL's manager enforces, else the entry's own."""
    keys = [("custom_envs", tag, "env_config", "max_steps"), ("custom_envs", tag, "max_steps")]
    stated = [conversion.integer(key, 1) for key in keys if conversion.value(key) is not None]
    turns = min(stated) if stated else default
    if turns is None:
        return
    change = f"two limits of a turn's number, {stated}; the smaller one holds" if len(set(stated)) > 1 else ""
    target = ("environment", "definitions", tag, "options", option)
    conversion.put(target, turns, *[key for key in keys if conversion.has(key)] or keys[:1], change=change)
