"""The states of a server whose device's memory can be freed. Pure; the shell is `sleep.py`.

    awake ──► falling asleep ──► asleep (HOST) ──► falling asleep ──► asleep (DISCARD)
      ▲                             │                                   │
      └──────────── waking ◄────────┴───────────────────────────────────┘

A transition that fails leaves the server asleep: for lack of memory at the level where it was, otherwise at DISCARD,
for then nobody knows what the engine holds.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, TypeAlias

import grpc

from rollwire.rpc.errors import Reason, RollwireError, precondition
from rollwire.v1 import rollout_pb2

AWAKE: Final = rollout_pb2.SLEEP_LEVEL_UNSPECIFIED
HOST: Final = rollout_pb2.SLEEP_LEVEL_HOST
DISCARD: Final = rollout_pb2.SLEEP_LEVEL_DISCARD
Level: TypeAlias = rollout_pb2.SleepLevel.ValueType


class Step(Enum):
    """What a request must do."""

    START = auto()
    """Carry the transition out."""
    AFTER = auto()
    """Wait until the transition in progress has ended, then ask again."""
    NOTHING = auto()
    """The server is where it was asked to be."""


class SleepStates:
    """The state machine.

    Attributes:
        level: What is freed now; `AWAKE` if nothing. While waking, the level that it wakes from.
        towards: Level of the transition in progress, `AWAKE` while waking; None without one.
    """

    def __init__(self) -> None:
        self.level: Level = AWAKE
        self.towards: Level | None = None

    @property
    def awake(self) -> bool:
        """True if the engine may be used."""
        return self.level == AWAKE and self.towards is None

    def require_awake(self, wanted: str) -> None:
        """Refuses what needs the engine.

        Args:
            wanted: What the caller wants done afterwards, such as `UpdateWeights again`.

        Raises:
            RollwireError: FAILED_PRECONDITION / `ASLEEP`.
        """
        if not self.awake:
            raise precondition(Reason.ASLEEP, f"the rollout server is asleep; call Wake, then {wanted}")

    def fall_asleep(self, level: Level, *, staging: bool) -> Step:
        """Accepts a request to sleep.

        Args:
            level: `HOST` or `DISCARD`.
            staging: Whether a weight update is in progress.

        Raises:
            RollwireError: ABORTED / `UPDATE_IN_PROGRESS`; FAILED_PRECONDITION / `ASLEEP`: the weights are dropped
                already and cannot be kept any more.
        """
        assert level in (HOST, DISCARD)
        if self.towards is not None:
            return Step.AFTER
        if self.level == level:
            return Step.NOTHING
        if self.level > level:
            raise precondition(
                Reason.ASLEEP,
                "the rollout server has dropped its weights and cannot go back to SLEEP_LEVEL_HOST; call Wake first",
            )
        if staging:
            raise RollwireError(
                grpc.StatusCode.ABORTED,
                Reason.UPDATE_IN_PROGRESS,
                "a version is being staged; call Sleep after that",
                retry_after_s=1.0,
            )
        self.towards = level
        return Step.START

    def asleep(self) -> None:
        """The memory is freed."""
        assert self.towards not in (None, AWAKE)
        self.level, self.towards = self.towards, None

    def wake(self) -> Step:
        """Accepts a request to wake."""
        if self.towards is not None:
            return Step.AFTER
        if self.level == AWAKE:
            return Step.NOTHING
        self.towards = AWAKE
        return Step.START

    def awakened(self) -> None:
        """The memory is taken again."""
        assert self.towards == AWAKE
        self.level, self.towards = AWAKE, None

    def stays_asleep(self) -> None:
        """The memory was not free; everything is as before the request to wake."""
        assert self.towards == AWAKE
        self.towards = None

    def lost(self) -> None:
        """The transition failed; what the engine holds is unknown."""
        assert self.towards is not None
        self.level, self.towards = DISCARD, None
