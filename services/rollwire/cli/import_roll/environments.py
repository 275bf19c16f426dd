"""Which environments are played, with which options and prompts, in training and in validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollwire.cli.import_roll.account import Fate
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

ENVIRONMENTS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {"frozen_lake": ("FrozenLake", FROZEN_LAKE_OPTIONS)}
"""By ROLL's `env_type`: Rollwire's type and the options that it takes."""

_NOT_YET: Final = ("sokoban",)


@dataclass(frozen=True)
class PlayedTags:
    """Tags that can be played.

    Attributes:
        train: Tags of training, each with its share of groups.
        validation: Tags of validation, each with its share.
    """

    train: Mapping[str, int]
    validation: Mapping[str, int]

    @property
    def all(self) -> Sequence[str]:
        """Tags of training; validation plays no others."""
        return list(self.train)


def map_environments(conversion: Conversion) -> PlayedTags:
    """Maps tags, their shares and their definitions.

    Raises:
        ConfigError: No tag of training can be played, or one is not defined.
    """
    wanted = _shares(conversion, "train_env_manager")
    train = {tag: share for tag, share in wanted.items() if _environment(conversion, tag) is not None}
    if not train:
        types = ", ".join(f"{tag} (env_type {_env_type(conversion, tag)})" for tag in wanted)
        raise ConfigError(
            f"{conversion.file.name}: none of the tags in train_env_manager.tags can be played: {types}; Rollwire has "
            f"{', '.join(ENVIRONMENTS)}, and your own environments as docs/environments.md says"
        )
    _missing(conversion, "train_env_manager", wanted)
    validated = _shares(conversion, "val_env_manager") if conversion.has("val_env_manager.tags") else {}
    validation = {tag: share for tag, share in validated.items() if tag in train}
    keys = ("train_env_manager.tags", "train_env_manager.num_groups_partition")
    single = len(train) == 1
    entries = [{"tag": tag} if single else {"tag": tag, "weight": float(share)} for tag, share in train.items()]
    conversion.put("environments", entries, *keys)
    for tag in train:
        _define(conversion, tag)
    for tag in conversion.tree.children(("custom_envs",)):
        if tag not in train:
            conversion.mark(("custom_envs", tag), Fate.IGNORED, "no group of training plays this tag")
    return PlayedTags(train, validation)


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


def _environment(conversion: Conversion, tag: str) -> tuple[str, Mapping[str, Any]] | None:
    return ENVIRONMENTS.get(_env_type(conversion, tag) or "")


def _missing(conversion: Conversion, manager: str, wanted: Mapping[str, int]) -> None:
    """Accounts for the tags of a manager that have no environment here."""
    missing = [tag for tag in wanted if _environment(conversion, tag) is None]
    if missing:
        why = f"{describe(conversion, missing)}; the other tags take over their groups"
        for key in ("tags", "num_groups_partition"):
            conversion.mark(f"{manager}.{key}", Fate.UNSUPPORTED, why)


def describe(conversion: Conversion, tags: Sequence[str]) -> str:
    """Returns why tags cannot be played."""
    by_type: dict[str, list[str]] = {}
    for tag in tags:
        by_type.setdefault(_env_type(conversion, tag) or "?", []).append(tag)
    return ", ".join(
        f"{' and '.join(found)}: env_type {kind} is not in Rollwire{' yet' if kind in _NOT_YET else ''}"
        for kind, found in by_type.items()
    )


def _define(conversion: Conversion, tag: str) -> None:
    """Maps the definition of one tag that is played."""
    entry = ("custom_envs", tag)
    found = _environment(conversion, tag)
    assert found is not None
    kind, options = found
    target = ("environment", "definitions", tag)
    conversion.put((*target, "type"), kind, (*entry, "env_type"))
    for name, default in options.items():
        key = (*entry, "env_config", name)
        if name == "max_steps":
            _turn_limit(conversion, tag, default)
            continue
        value = conversion.value(key)
        value = default if value is None else value
        if value is not None:
            conversion.put((*target, "options", name), value, key)
    conversion.rest((*entry, "env_config"), Fate.UNSUPPORTED, f"{kind} has no such option")


def _turn_limit(conversion: Conversion, tag: str, default: int) -> None:
    """Maps the most turns: the environment's, which ROLL's manager enforces, else the entry's own."""
    keys = [("custom_envs", tag, "env_config", "max_steps"), ("custom_envs", tag, "max_steps")]
    stated = [conversion.integer(key, 1) for key in keys if conversion.value(key) is not None]
    turns = min(stated) if stated else default
    change = f"two limits of a turn's number, {stated}; the smaller one holds" if len(set(stated)) > 1 else ""
    target = ("environment", "definitions", tag, "options", "max_steps")
    conversion.put(target, turns, *[key for key in keys if conversion.has(key)] or keys[:1], change=change)
