"""The policy that the server serves: an engine behind a gate that closes while weights change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from enum import Enum, auto

from rollwire.rollout.engine import Engine, GenerationRequest, Piece
from rollwire.rollout.sleep_states import SleepStates
from rollwire.rollout.weight_states import WeightStates
from rollwire.rpc.errors import Reason, RollwireError, precondition


class Hold(Enum):
    """Why no generation may start; the gate is open when nothing holds it shut."""

    UPDATE = auto()
    """The engine's weights are being replaced."""
    PAUSE = auto()
    """A caller of Pause holds a lease."""
    CHECK = auto()
    """What the engine holds is being read back."""
    SLEEP = auto()
    """The device's memory is freed, or being freed or taken again."""


class Policy:
    """Admits generations to the engine.

    Attributes:
        engine: The engine.
        states: Which version serves; advanced by the updater, and by the sleeper when weights are dropped.
        sleep: Whether the device's memory is freed; advanced by the sleeper alone.
        holds: What holds the gate shut.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.states = WeightStates()
        self.sleep = SleepStates()
        self.holds: set[Hold] = set()
        self._running = 0
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Piece, None]:
        """Generates under one version; waits while weights change. Closing the iterator aborts.

        A generation that had to make way for new weights ends with STOP_REASON_ABORTED.

        Raises:
            RollwireError: FAILED_PRECONDITION / `NO_WEIGHTS` when no version is active.
            GenerationError: The engine failed.
        """
        while not self._open.is_set():
            await self._open.wait()
        if self.states.active is None:
            raise no_weights()
        # Nothing is awaited between here and the submission to the engine, so a gate that closes sees this one running.
        self._running += 1
        self._empty.clear()
        try:
            async with aclosing(self.engine.generate(request)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._running -= 1
            if self._running == 0:
                self._empty.set()

    def close_gate(self, hold: Hold = Hold.UPDATE) -> None:
        """Lets no further generation start."""
        self.holds.add(hold)
        self._open.clear()

    def open_gate(self, hold: Hold = Hold.UPDATE) -> None:
        """Ends one hold; generations start again when there is no other. Without the hold it does nothing."""
        self.holds.discard(hold)
        if not self.holds:
            self._open.set()

    async def drain(self, timeout_s: float) -> bool:
        """Waits until no generation runs; returns False when the time passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True


def no_weights() -> RollwireError:
    """Returns the error of a server without an active version."""
    return precondition(
        Reason.NO_WEIGHTS, "no weights are active yet; call UpdateWeights with a learner's version first"
    )
