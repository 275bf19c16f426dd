"""Limits of a worker process, set by itself before it runs anything of the environment."""

from __future__ import annotations

import contextlib
import random
import resource
import sys
from pathlib import Path
from typing import Final

from rollwire.rpc.limits import MIB

_OOM_SCORE: Final = "500"
"""When the machine runs out of memory, the kernel ends workers before servers."""


def confine(memory_mib: int) -> None:
    """Limits this process.

    The limit of memory counts what the process may write and shares with nobody, touched or not. Address space alone
    is no measure: libraries reserve many times what they use.

    Args:
        memory_mib: Most memory; 0 is unlimited.
    """
    if memory_mib:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mib * MIB, memory_mib * MIB))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def reseed() -> None:
    """Gives the global generators states of their own: forks of one zygote would all draw the same.

    NumPy's has one from its import on; where that is still to come, it is each worker's own.
    """
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
