"""What Linux offers to end a process together with all that it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def die_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process when the thread that started it ends; ends it if that happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def outlive_parent() -> None:
    """Takes `die_with_parent` back."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def become_subreaper() -> None:
    """Makes orphans among this process's descendants its children, so that none gets lost."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def has_ended(pid: int) -> bool:
    """Tells whether a child has ended, without taking its status: until then nobody else can get its number."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill_group(pid: int) -> None:
    """Kills a process that leads a group, and all in that group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def kill_strays(leaders: Collection[int]) -> None:
    """Kills and reaps the children of this process that belong to none of its workers.

    Such are orphans of workers that made a session of their own. Their children become this process's when they end:
    call it again on SIGCHLD.

    Args:
        leaders: Process ids of the workers. Each leads a session.
    """
    for pid in children() - set(leaders):
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if os.getsid(pid) in leaders and not has_ended(pid):
                continue  # an orphan of a worker that lives: it ends with the worker
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)


def thread_count() -> int:
    """Returns how many threads this process has, those of libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))


def children() -> set[int]:
    """Returns the process ids of this process's children, those that ended and were not reaped included."""
    lists = list(Path("/proc/self/task").glob("*/children"))
    if lists:
        return {int(pid) for path in lists for pid in path.read_text().split()}
    return {int(path.name) for path in Path("/proc").glob("[0-9]*") if _parent_of(path) == os.getpid()}


def _parent_of(process: Path) -> int | None:
    try:
        # The name, in parentheses, may hold anything.
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
