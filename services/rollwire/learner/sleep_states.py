"""The states of a learner whose device can be freed. Pure; the shell is `sleep_calls.py`.

    awake ──fall_asleep──► falling asleep ──ended──► asleep ──wake──► waking ──ended──► awake
                                  └───failed───► half asleep ◄───failed───┘

A transition that fails may leave some memory on the device and some on the host: the learner cannot compute, `Sleep`
moves the rest to the host and `Wake` brings all of it back.
"""

from __future__ import annotations

from enum import Enum, auto

from rollwire.rpc.errors import Reason, precondition


class SleepState(Enum):
    """Where the learner's memory is."""

    AWAKE = auto()
    """On the device."""
    FALLING_ASLEEP = auto()
    """On its way to the host."""
    ASLEEP = auto()
    """In host memory."""
    WAKING = auto()
    """On its way to the device."""
    HALF_ASLEEP = auto()
    """Some of it here, some there: a transition failed."""


class SleepStates:
    """The state machine. Transitions never overlap: the shell starts one after the other.

    Attributes:
        state: The present state.
    """

    def __init__(self) -> None:
        self.state = SleepState.AWAKE

    @property
    def asleep(self) -> bool:
        """True if the learner cannot compute."""
        return self.state is not SleepState.AWAKE

    def require_awake(self, wanted: str) -> None:
        """Refuses what computes.

        Args:
            wanted: What the caller wants done, such as `Train`.

        Raises:
            RollwireError: FAILED_PRECONDITION / `ASLEEP`.
        """
        if self.asleep:
            raise precondition(Reason.ASLEEP, f"the learner is asleep; call Wake, then {wanted} again")

    def fall_asleep(self) -> bool:
        """Begins to fall asleep; False if it is asleep already."""
        return self._begin(SleepState.ASLEEP, SleepState.FALLING_ASLEEP)

    def wake(self) -> bool:
        """Begins to wake; False if it is awake already."""
        return self._begin(SleepState.AWAKE, SleepState.WAKING)

    def ended(self) -> None:
        """The transition has succeeded."""
        assert self.state in (SleepState.FALLING_ASLEEP, SleepState.WAKING)
        self.state = SleepState.ASLEEP if self.state is SleepState.FALLING_ASLEEP else SleepState.AWAKE

    def failed(self) -> None:
        """The transition has failed."""
        assert self.state in (SleepState.FALLING_ASLEEP, SleepState.WAKING)
        self.state = SleepState.HALF_ASLEEP

    def _begin(self, reached: SleepState, then: SleepState) -> bool:
        assert self.state not in (SleepState.FALLING_ASLEEP, SleepState.WAKING), "transitions overlap"
        if self.state is reached:
            return False
        self.state = then
        return True
