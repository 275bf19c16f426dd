"""Counter-based seeds and uniform numbers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollwire.rollout.seeds import _mixed, derive_seed, uniforms

WORDS = st.integers(0, 2**64 - 1)


@given(WORDS, st.integers(0, 2**32 - 1))
def test_scalar_and_vector_agree(seed: int, index: int) -> None:
    assert derive_seed(seed, index) == int(_mixed(np.array([seed], np.uint64), np.array([index], np.uint64))[0])


def test_first_output_is_the_published_one() -> None:
    # SplitMix64 seeded with 0 starts 0xE220A8397B1DCDAF (the reference implementation's first number).
    assert derive_seed(0, 0) == derive_seed(2**64, 0)
    first = 0xE220A8397B1DCDAF
    # derive_seed(0, i) is the stream of SplitMix64 whose state is that number.
    state = (first + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    assert derive_seed(0, 0) == state ^ (state >> 31)


def test_children_differ_from_each_other_and_from_those_of_neighbouring_seeds() -> None:
    children = [derive_seed(seed, index) for seed in range(200) for index in range(50)]
    assert len(set(children)) == len(children)


def test_uniform_numbers_are_below_one_and_uniform() -> None:
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 100)
    positions = np.tile(np.arange(100, dtype=np.uint64), 200)
    numbers = uniforms(seeds, positions)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 44  # 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_few_bits_stay_below_one_in_float32() -> None:
    numbers = uniforms(np.arange(10_000, dtype=np.uint64), np.zeros(10_000, np.uint64), bits=23).astype(np.float32)
    assert numbers.max() < 1
