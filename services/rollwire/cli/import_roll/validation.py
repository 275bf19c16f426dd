"""Validation: how often, on how many start states, of which tags."""

from __future__ import annotations

import math
from typing import Final

from rollwire.cli.import_roll.account import Fate
from rollwire.cli.import_roll.conversion import Conversion
from rollwire.cli.import_roll.environments import PlayedTags, describe

_MANAGER: Final = "val_env_manager"


def map_validation(conversion: Conversion, tags: PlayedTags) -> None:
    """Maps validation. Rollwire validates every entry of `environments`, each on the same number of start states."""
    every = conversion.integer("eval_steps", -1)
    if every <= 0:
        conversion.put("validation.episodes", 0, "eval_steps")
        conversion.mark("val_batch_size", Fate.IGNORED, "eval_steps switches validation off")
        conversion.mark(_MANAGER, Fate.IGNORED, "eval_steps switches validation off")
        return
    conversion.put("validation.every_steps", every, "eval_steps")
    _tags(conversion, tags)
    _episodes(conversion, tags)
    size = conversion.integer(f"{_MANAGER}.group_size", 1)
    if size > 1:
        why = f"validation plays every start state once: {size} times as many states instead of {size} episodes on each"
        conversion.mark(f"{_MANAGER}.group_size", Fate.CHANGED, why)
    else:
        conversion.used(f"{_MANAGER}.group_size")
    conversion.mark(f"{_MANAGER}.num_env_groups", Fate.IGNORED, "val_batch_size says how many episodes are played")


def _episodes(conversion: Conversion, tags: PlayedTags) -> None:
    keys = ("val_batch_size", f"{_MANAGER}.num_groups_partition")
    batch = conversion.integer("val_batch_size", -1)
    if not tags.validation:
        why = "no tag of validation can be played: validation is off; validation.episodes=N validates the trained tags"
        conversion.put("validation.episodes", 0, *keys, change=why)
        return
    if batch < 1:
        why = "environments do not run out of data; Rollwire's default number of start states is used"
        conversion.mark("val_batch_size", Fate.CHANGED, why)
        return
    total = sum(_groups(conversion))
    shares = {tag: batch * share / total for tag, share in tags.validation.items()}
    episodes = math.ceil(max(shares.values()))
    same = all(share == episodes for share in shares.values()) and set(shares) == set(tags.all)
    change = "" if same else f"every tag that is played is validated on {episodes} start states"
    conversion.put("validation.episodes", episodes, *keys, change=change)


def _groups(conversion: Conversion) -> list[int]:
    partition, tags = conversion.value(f"{_MANAGER}.num_groups_partition"), conversion.value(f"{_MANAGER}.tags")
    return partition if isinstance(partition, list) and len(partition) == len(tags) else [1] * len(tags)


def _tags(conversion: Conversion, tags: PlayedTags) -> None:
    key = f"{_MANAGER}.tags"
    wanted = list(dict.fromkeys(conversion.value(key) or ()))
    others = [tag for tag in wanted if tag not in tags.validation]
    if others:
        conversion.mark(key, Fate.UNSUPPORTED, describe(conversion, others))
    else:
        conversion.used(key)
