from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollwire.coordinator.seeds import environment_seed, sampling_seed, shuffle_seed

SEEDS = st.integers(0, 2**63 - 1)


def test_the_documented_formula() -> None:
    digest = hashlib.sha256(b"rollwire/1|42|environment|validation|FrozenLake|7").digest()
    assert environment_seed(42, "validation", "FrozenLake", 7) == int.from_bytes(digest[:8], "big") % 2**63


def test_fixed_values() -> None:
    # A change here changes every run: the validation set is part of the record of a run.
    assert environment_seed(42, "train", "FrozenLake", 0) == 4272437365673233671
    assert sampling_seed(42, "train", "FrozenLake", 0) == 1806489717348533201
    assert shuffle_seed(42, 0) == 5141850264988379620


@given(SEEDS, st.integers(0, 10**9))
def test_numpy_and_sqlite_take_every_seed(run_seed: int, index: int) -> None:
    for seed in (
        environment_seed(run_seed, "train", "A", index),
        sampling_seed(run_seed, "train", "A", index),
        shuffle_seed(run_seed, index),
    ):
        assert 0 <= seed < 2**63
        np.random.SeedSequence(seed)


def test_all_seeds_of_a_run_differ() -> None:
    seeds = [
        function(seed, split, tag, index)
        for function in (environment_seed, sampling_seed)
        for seed in (1, 11)
        for split in ("train", "validation")
        for tag in ("A", "B")
        for index in range(500)
    ]
    assert len(set(seeds)) == len(seeds)


def test_parts_cannot_run_into_each_other() -> None:
    assert environment_seed(1, "train", "A", 11) != environment_seed(1, "train", "A1", 1)
    assert environment_seed(11, "train", "A", 1) != environment_seed(1, "train", "1A", 1)
