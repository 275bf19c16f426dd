"""What adapters share: importing an optional library, and seeds that it takes."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, extra: str) -> Any:
    """Imports a module of an optional library.

    Raises:
        ImportError: It is not installed; the text names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{error}; install what it needs with: pip install 'rollwire[{extra}]'") from error


def seed_of_32_bits(seed: int) -> int:
    """Folds a seed of 64 bits: libraries that seed NumPy's old generator take 32."""
    return (seed ^ seed >> 32) & 0xFFFF_FFFF
