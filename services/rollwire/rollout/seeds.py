"""Seeds and uniform numbers from counters: every draw is a function of its seed and position, never of a shared state.

The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), which passes the usual test batteries on sequential counters.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_WORD: Final = (1 << 64) - 1


def derive_seed(seed: int, index: int) -> int:
    """Returns the 64-bit seed of child `index` of a seed."""
    golden = int(_GOLDEN)
    return _finalised_one(_finalised_one(seed + golden) + (index + 1) * golden)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64], bits: int = 52) -> NDArray[np.float64]:
    """Returns one number in [0, 1) per row: a multiple of 2**-bits.

    Args:
        seeds: uint64[n].
        positions: uint64[n], which draw of its seed each row is.
        bits: Resolution; at most the mantissa of the type that the number is used in, so that it stays below 1.
    """
    return (_mixed(seeds, positions) >> np.uint64(64 - bits)).astype(np.float64) * 2.0**-bits


def _mixed(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The seed is mixed before the position is added, so that neighbouring seeds do not share a shifted stream.
    return _finalised(_finalised(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)


def _finalised(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))


def _finalised_one(number: int) -> int:
    """Does what `_finalised` does, on one Python integer."""
    state = number & _WORD
    state = ((state ^ (state >> 30)) * int(_FIRST)) & _WORD
    state = ((state ^ (state >> 27)) * int(_SECOND)) & _WORD
    return state ^ (state >> 31)
