"""The policy that the server serves: an engine behind a gate that closes while weights change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final, TypeAlias

from rollwire.rollout.continuation import continuation, reason_to_stop
from rollwire.rollout.engine import Engine, GenerationRequest, Piece
from rollwire.rollout.sleep_states import SleepStates
from rollwire.rollout.weight_states import WeightStates
from rollwire.rpc.errors import Reason, RollwireError, precondition
from rollwire.v1 import rollout_pb2, trajectory_pb2

PauseMode: TypeAlias = rollout_pb2.PauseMode.ValueType
_GOES_ON: Final = trajectory_pb2.STOP_REASON_UNSPECIFIED


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


@dataclass(eq=False)
class _Running:
    """A generation in the engine; `keep` once it was stopped to go on later."""

    keep: bool = False


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
        self._running: set[_Running] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Piece, None]:
        """Generates; waits while the gate is shut. Closing the iterator aborts.

        A generation that had to make way ends with STOP_REASON_ABORTED, or goes on when the gate opens again, under the
        version that is active then: its pieces name different versions. See `make_way`.

        Raises:
            RollwireError: FAILED_PRECONDITION / `NO_WEIGHTS` when no version is active.
            GenerationError: The engine failed.
        """
        asked, drawn = request, list[int]()
        while True:
            running, last = await self._admitted(), None
            # Nothing was awaited since the admission, so a gate that closes sees this one running.
            try:
                async with aclosing(self.engine.generate(asked)) as pieces:
                    async for piece in pieces:
                        drawn += piece.token_ids
                        if piece.stop_reason == _GOES_ON:
                            yield piece
                        else:
                            last = piece
            finally:
                self._ended(running)
            assert last is not None, "the engine gave no reason to stop"
            if running.keep and last.stop_reason == trajectory_pb2.STOP_REASON_ABORTED:
                last = replace(last, stop_reason=reason_to_stop(request, drawn))
            if last.token_ids or last.stop_reason != _GOES_ON:
                yield last
            if last.stop_reason != _GOES_ON:
                return
            asked = continuation(request, drawn)

    async def make_way(self, hold: Hold, mode: PauseMode, wait_s: float) -> int:
        """Ends or stops what runs, behind a gate that is shut already.

        Args:
            hold: What holds the gate shut; if it ends while this waits, nothing is interrupted.
            mode: What happens to generations: they get `wait_s` to end, are aborted, or stop and go on when the gate
                opens again.
            wait_s: Time to end under PAUSE_MODE_WAIT.

        Returns:
            How many generations were interrupted.
        """
        if mode == rollout_pb2.PAUSE_MODE_WAIT and (await self.drain(wait_s) or hold not in self.holds):
            return 0
        interrupted = set(self._running)
        for running in interrupted:
            running.keep = mode == rollout_pb2.PAUSE_MODE_KEEP
        if interrupted:
            await self.engine.abort_all()
        return len(interrupted)

    @property
    def admits(self) -> bool:
        """True if a generation would start now."""
        return not self.holds and self.states.active is not None

    def close_gate(self, hold: Hold) -> None:
        """Lets no further generation start."""
        self.holds.add(hold)
        self._open.clear()

    def open_gate(self, hold: Hold) -> None:
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

    async def _admitted(self) -> _Running:
        """Waits until the gate is open and returns what counts as running from now on."""
        while not self._open.is_set():
            await self._open.wait()
        if self.states.active is None:
            raise no_weights()
        running = _Running()
        self._running.add(running)
        self._empty.clear()
        return running

    def _ended(self, running: _Running) -> None:
        self._running.discard(running)
        if not self._running:
            self._empty.set()


def no_weights() -> RollwireError:
    """Returns the error of a server without an active version."""
    return precondition(
        Reason.NO_WEIGHTS, "no weights are active yet; call UpdateWeights with a learner's version first"
    )
