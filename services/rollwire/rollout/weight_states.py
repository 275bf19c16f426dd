"""The states of a weight update: which version serves, which one is being staged. Pure; the shell is `weights.py`.

    idle ─begin► fetching ─verified► preparing ─prepared► draining ─drained► loading ─loaded► idle
    (any but loading) ─failed► idle, the old version serves     loading ─failed► idle, nothing serves

Every arrow names its version: a repeat, and an arrow of a version that serves by now, change nothing.

What the engine holds is unknown from the moment loading begins until its digest has been compared. In that time, and
after a load that failed, nothing serves: a mix of two versions must never generate (I3).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import grpc

from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.versions import version_text
from rollwire.v1 import weights_pb2


class Phase(Enum):
    """How far the update in progress is."""

    IDLE = auto()
    """No update in progress."""
    FETCHING = auto()
    """The stream is arriving; the old version generates."""
    PREPARING = auto()
    """Verified in host memory; the engine may make a copy of its own; the old version generates."""
    DRAINING = auto()
    """The gate is shut: running generations of the old version end, are aborted or stop, new ones wait."""
    LOADING = auto()
    """The engine's weights are being overwritten."""


class Begin(Enum):
    """What an update request must do."""

    START = auto()
    """Carry the update out."""
    JOIN = auto()
    """Wait for the one in progress: it brings the same version."""
    ALREADY_ACTIVE = auto()
    """Nothing: the version serves."""


@dataclass(frozen=True)
class Served:
    """A version that serves, with the digest of what the engine holds."""

    version: weights_pb2.WeightVersion
    digest: bytes


class WeightStates:
    """The state machine.

    Attributes:
        active: What serves; None before the first update, while loading, and after a failed load.
        phase: Progress of the update.
        staging: Version that the update brings; None when idle.
    """

    def __init__(self) -> None:
        self.active: Served | None = None
        self.phase = Phase.IDLE
        self.staging: weights_pb2.WeightVersion | None = None

    def begin(self, version: weights_pb2.WeightVersion) -> Begin:
        """Accepts a request for a version.

        Raises:
            RollwireError: ABORTED / `UPDATE_IN_PROGRESS` while another version is being staged.
        """
        if self.staging is not None:
            if self.staging == version:
                return Begin.JOIN
            raise RollwireError(
                grpc.StatusCode.ABORTED,
                Reason.UPDATE_IN_PROGRESS,
                f"version {version_text(self.staging)} is being staged; ask for {version_text(version)} after that",
                metadata={"staging": version_text(self.staging)},
                retry_after_s=1.0,
            )
        if self.active is not None and self.active.version == version:
            return Begin.ALREADY_ACTIVE
        self.staging = version
        self.phase = Phase.FETCHING
        return Begin.START

    def verified(self, version: weights_pb2.WeightVersion) -> None:
        """The stream is complete and verified; the engine may prepare."""
        self._advance(version, Phase.FETCHING)

    def prepared(self, version: weights_pb2.WeightVersion) -> None:
        """The engine has prepared; the gate shuts, and running generations are to end."""
        self._advance(version, Phase.PREPARING)

    def drained(self, version: weights_pb2.WeightVersion) -> None:
        """Nothing generates any more; the engine's weights will be overwritten now."""
        if self._advance(version, Phase.DRAINING):
            self.active = None

    def loaded(self, version: weights_pb2.WeightVersion, held: bytes, expected: bytes) -> Served:
        """Activates the version if the engine holds exactly what the manifest announced.

        Raises:
            RollwireError: DATA_LOSS / `WEIGHTS_CORRUPT`; nothing serves until another update succeeds.
        """
        if self.active is not None and self.active.version == version:
            return self.active
        assert self.phase is Phase.LOADING and self.staging == version, f"{version_text(version)} is not being loaded"
        self._end()
        if held != expected:
            raise RollwireError(
                grpc.StatusCode.DATA_LOSS,
                Reason.WEIGHTS_CORRUPT,
                f"after loading {version_text(version)} the engine holds digest {held.hex()[:16]}…, the manifest says "
                f"{expected.hex()[:16]}…; nothing is served until an update succeeds",
            )
        self.active = Served(version, held)
        return self.active

    def discard(self) -> None:
        """The engine's weights are dropped or unknown; nothing serves until an update has succeeded."""
        assert self.phase is not Phase.LOADING
        self.active = None

    def failed(self, version: weights_pb2.WeightVersion) -> None:
        """Ends an update that did not succeed; what served before loading began still serves."""
        if self.staging == version:
            self._end()

    def _advance(self, version: weights_pb2.WeightVersion, before: Phase) -> bool:
        """Goes from a phase to the next one; False if that was done before."""
        if self.active is not None and self.active.version == version:
            return False
        assert self.staging == version, f"{version_text(version)} is not being staged"
        if self.phase.value > before.value:
            return False
        assert self.phase is before, f"{self.phase} is not {before}"
        self.phase = Phase(before.value + 1)
        return True

    def _end(self) -> None:
        self.phase = Phase.IDLE
        self.staging = None
