"""How ranks learn that another one has failed: causes and signs of life in the store, looked at twice a second.

A rank that fails writes its cause and ends. Rank 0 sees the cause, the end of a process that it started, or the missing
sign of life; it then writes the verdict, on which the others end. A rank whose peer vanishes usually notices first, by
an error of the collective operation that both were in; such errors do not count while another cause may be found.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rollwire.learner.seats import Seat

LOOK_S: Final = 0.5
"""Time between two looks."""

LOST_AFTER_S: Final = 30.0
"""A rank that gives no sign of life for so long is lost."""

CAUSE_WAIT_S: Final = 3.0
"""How long rank 0 waits for the cause after an error that another rank's failure may have led to."""

_SHOWN_CAUSE: Final = 500
_TRANSPORTS: Final = ("gloo", "nccl", "hccl", "connection closed", "connection reset", "tcpstore", "socket")


@dataclass(frozen=True)
class RankFailure:
    """Which rank failed and why.

    Attributes:
        rank: The rank.
        cause: One line.
        consequence: True if it looks like a consequence of another rank's failure.
    """

    rank: int
    cause: str
    consequence: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} of the learner failed: {self.cause}"


def describe(rank: int, error: BaseException) -> RankFailure:
    """Returns an exception as a failure of a rank."""
    text = " ".join(str(error).split())[:_SHOWN_CAUSE]
    cause = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return RankFailure(rank, cause, any(name in text.lower() for name in _TRANSPORTS))


class RankWatch:
    """Watches the other ranks from a thread of its own.

    Args:
        seat: This rank.
        on_failure: Called once, from that thread, when the ranks must end.
        ended_processes: On rank 0: returns failures of processes that it started and that have ended.
    """

    def __init__(
        self,
        seat: Seat,
        on_failure: Callable[[RankFailure], object],
        ended_processes: Callable[[], list[RankFailure]] = list,
    ) -> None:
        self._seat = seat
        self._on_failure = on_failure
        self._ended_processes = ended_processes
        self._store: Any = seat.open_store()  # a connection blocks while it waits: the thread has its own
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._seen: dict[int, tuple[int, float]] = {}
        self._waiting_since: float | None = None
        self._beats = 0
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def report(self, failure: RankFailure) -> None:
        """Tells the other ranks that this one fails; does nothing when they cannot be reached any more."""
        try:
            with self._lock:
                self._store.set(f"failure/{failure.rank}", json.dumps([failure.cause, failure.consequence]))
        except RuntimeError:
            return

    def judge(self, own: RankFailure) -> RankFailure:
        """Returns, on rank 0, the failure that an own error follows from; the own one if no other is found in time."""
        end = time.monotonic() + CAUSE_WAIT_S
        while own.consequence and time.monotonic() < end:
            found = self._failures()
            if found and not found[0].consequence:
                return found[0]
            time.sleep(LOOK_S / 5)
        return own

    def conclude(self, failure: RankFailure | None = None) -> None:
        """Writes the verdict, on rank 0: the other ranks end, with an error if there is a failure."""
        self._closed.set()
        try:
            with self._lock:
                self._store.set("verdict", str(failure) if failure is not None else "")
        except RuntimeError:
            return  # they see that themselves

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                failure = self._look()
            except RuntimeError as error:  # the store is gone, and with it whoever serves it
                failure = RankFailure(0, f"its store does not answer ({' '.join(str(error).split())[:200]})")
            if failure is not None and not self._closed.is_set():
                self._closed.set()
                self._on_failure(failure)

    def _look(self) -> RankFailure | None:
        self._beats += 1
        with self._lock:
            self._store.set(f"beat/{self._seat.rank}", str(self._beats))
            if self._seat.rank != 0:
                return self._verdict()
        failures = self._failures()
        if failures and failures[0].consequence:
            self._waiting_since = self._waiting_since or time.monotonic()
            if time.monotonic() - self._waiting_since < CAUSE_WAIT_S:
                return None
        return failures[0] if failures else self._lost()

    def _verdict(self) -> RankFailure | None:
        if not self._store.check(["verdict"]):
            return None
        return RankFailure(0, self._store.get("verdict").decode(), consequence=True)

    def _failures(self) -> list[RankFailure]:
        """Returns what is known of failed ranks, causes before consequences."""
        found = list(self._ended_processes())
        for rank in range(1, self._seat.size):
            with self._lock:
                told = self._store.check([f"failure/{rank}"])
                text = self._store.get(f"failure/{rank}") if told else b""
            if told:
                found = [failure for failure in found if failure.rank != rank]  # its own words say more
                found.append(RankFailure(rank, *json.loads(text)))
        return sorted(found, key=lambda failure: failure.consequence)

    def _lost(self) -> RankFailure | None:
        """Returns the failure of a rank whose sign of life stays the same."""
        now = time.monotonic()
        for rank in range(1, self._seat.size):
            with self._lock:
                known = self._store.check([f"beat/{rank}"])
                beat = int(self._store.get(f"beat/{rank}")) if known else 0
            last, since = self._seen.get(rank, (-1, now))
            if beat != last:
                since = now
            elif now - since > LOST_AFTER_S and known:
                return RankFailure(rank, f"it gave no sign of life for {LOST_AFTER_S:g} s")
            self._seen[rank] = (beat, since)
        return None
