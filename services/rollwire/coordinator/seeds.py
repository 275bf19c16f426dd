"""Every seed of a run, derived from the run's seed. Pure.

A seed is the first eight bytes, big-endian, of the SHA-256 of a text, with the highest bit cleared:

    rollwire/1|<run seed>|<purpose>|<split>|<tag>|<index>

The parts are separated by `|`, which no tag may contain, so that different parts give different texts. A seed depends
on nothing else: not on timing, the number of servers or Python's hash seed. Training and validation differ in
`split`, so their start states are drawn independently. Results stay below 2**63: numpy accepts them and SQLite stores
them.
"""

from __future__ import annotations

import hashlib
from typing import Final, Literal

Split = Literal["train", "validation"]

_FORMAT: Final = "rollwire/1"
_MASK: Final = (1 << 63) - 1


def environment_seed(run_seed: int, split: Split, tag: str, index: int) -> int:
    """Returns the seed of the start state that all episodes of a group share.

    Args:
        run_seed: Seed of the run.
        split: `train`, or `validation`, whose seeds are the same at every validation.
        tag: Environment tag.
        index: Position of the group in the run, or of the start state in the validation set.
    """
    return _derive(run_seed, "environment", split, tag, index)


def sampling_seed(run_seed: int, split: Split, tag: str, index: int) -> int:
    """Returns the seed that a group's sampling starts from; a rollout server derives one per episode from it."""
    return _derive(run_seed, "sampling", split, tag, index)


def episode_seed(group_seed: int, episode_index: int, attempt: int) -> int:
    """Returns the seed that the sampling of an agent's episode starts from; each attempt has its own.

    Args:
        group_seed: Sampling seed of the group.
        episode_index: Position in the group.
        attempt: Attempt at the episode.
    """
    return _derive(group_seed, "episode", "train", str(attempt), episode_index)


def shuffle_seed(run_seed: int, step: int) -> int:
    """Returns the seed with which the learner divides the batch of training step `step` (from 0)."""
    return _derive(run_seed, "shuffle", "train", "", step)


def _derive(run_seed: int, purpose: str, split: Split, tag: str, index: int) -> int:
    text = "|".join((_FORMAT, str(run_seed), purpose, split, tag, str(index)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") & _MASK
