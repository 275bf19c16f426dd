"""Environments that do to their process what no server must feel. The action says what."""

import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

MIB = 1 << 20
np.random.random()  # the generator exists before the first fork


class Faulty:
    """Does what the action says, and answers with its process id."""

    metrics_agg_mode: ClassVar = {"turn": "last"}

    def __init__(self, limit: int = 100, note: str = "", start_with: str = "") -> None:
        if limit > 1000:
            raise ValueError(f"limit is {limit}; allowed: at most 1000")
        self.max_turns = limit
        self.note = note
        self.start_with = start_with
        self.turn = 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.do(self.start_with)
        return str(os.getpid()), {"instructions": f"seed {seed}", "suffix": "?"}

    def step(self, action: str) -> Any:
        self.turn += 1
        observation = self.do(action)
        info = {"metrics": {"turn": self.turn, "late": 1.0}, "metrics_agg_mode": {"late": "sum"}, "suffix": "!"}
        results: dict[str, Any] = {
            "nan": ("", float("nan"), False, False, {}),
            "none": None,
            "classes": (Faulty, Faulty, Faulty, Faulty, Faulty),
            "lambda": (lambda: 0, 0.0, False, False, {}),
            "endless": ("", 10**5000, False, False, {}),
            "cyclic": (info, 0.0, False, False, info),
            "picture": ("", 0.0, False, False, {"observation_rgb": np.zeros((4, 6, 3), np.uint8)}),
            "huge picture": ("", 0.0, False, False, {"observation_png": b"\x89PNG\r\n\x1a\n" + bytes(50 * MIB)}),
        }
        return results.get(action, (observation, 0.5, action == "stop", False, info))

    def do(self, action: str) -> str:
        deed = getattr(self, "do_" + action.replace(" ", "_"), None)
        return str(os.getpid()) if deed is None else str(deed() or os.getpid())

    def render_text(self) -> str:
        self.do(self.note)
        return f"turn {self.turn}"

    def close(self) -> None:
        self.do(self.note)
        if self.note.startswith("/"):
            Path(self.note).write_text(f"closed in turn {self.turn}")

    def do_random(self) -> str:
        return f"{random.random()} {np.random.random()}"

    def do_raise(self) -> None:
        raise ZeroDivisionError("cannot divide /srv/data/secret.txt\nby zero")

    def do_exit(self) -> None:
        sys.exit(3)

    def do_os_exit(self) -> None:
        os._exit(7)

    def do_kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def do_abort(self) -> None:
        print("about to abort", flush=True)
        os.abort()

    def do_segfault(self) -> None:
        ctypes.string_at(0)

    def do_sleep(self) -> None:
        time.sleep(3600)

    def do_busy(self) -> None:
        """Native code that never lets go of the interpreter lock."""
        re.fullmatch("(a+)+", "a" * 100 + "b")

    def do_stopped(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def do_deaf(self) -> None:
        """Blocks what can be blocked."""
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(1)

    def do_flood(self) -> None:
        for _ in range(1000):
            os.write(1, b"noise " * 20_000)
        print("the last line")

    def do_flood_and_die(self) -> None:
        self.do_flood()
        sys.stderr.write("its last words\n")
        os._exit(1)

    def do_hog(self) -> None:
        self.hoard = [bytearray(64 * MIB) for _ in range(100)]

    def do_recursion(self) -> None:
        self.do_recursion()

    def do_long(self) -> str:
        return "x" * (50 * MIB)

    def do_pollute(self) -> None:
        """Writes into every descriptor that is open."""
        for path in list(Path("/proc/self/fd").iterdir()):
            if int(path.name) > 2:
                try:
                    os.write(int(path.name), b"garbage " * 10)
                except OSError:
                    continue

    def do_close_all(self) -> None:
        os.closerange(0, 4096)

    def do_fork_and_return(self) -> None:
        """The child comes back from the turn, too."""
        os.fork()

    def do_offspring(self) -> str:
        """Leaves processes behind: a child, one with a session of its own, an orphan, and a detached program."""
        for detached in (False, True):
            if os.fork() == 0:
                if detached:
                    os.setsid()
                time.sleep(3600)
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
                time.sleep(3600)
            os._exit(0)
        program = [sys.executable, "-c", "import time; time.sleep(3600)"]
        subprocess.Popen(program, start_new_session=True)
        return str(os.getpid())

    def do_offspring_and_die(self) -> None:
        self.do_offspring()
        os._exit(0)

    def do_bomb(self) -> None:
        """A hundred processes and more, each in a session of its own, that hold the output open and go on for good."""
        for _ in range(7):
            os.fork()
            os.setsid() if os.getsid(0) != os.getpid() else None
        time.sleep(3600)


class Shared(Faulty):
    """Says itself how it is run."""

    isolation = "process"
    sessions_per_process = 3


class Threaded(Faulty):
    """Says itself that it stays in the server."""

    isolation = "thread"


class Confused(Faulty):
    """Says nonsense."""

    isolation = "container"


class Crowded(Faulty):
    """Says nonsense."""

    isolation = "process"
    sessions_per_process = "many"


class CrashesWhenMade(Faulty):
    """Cannot even be constructed."""

    def __init__(self) -> None:
        print("libfaulty.so is broken", flush=True)
        os.abort()


class ExitsWhenMade(Faulty):
    """Cannot even be constructed."""

    def __init__(self) -> None:
        sys.exit(4)


class HangsWhenMade(Faulty):
    """Is never there."""

    def __init__(self) -> None:
        self.do_busy()
