"""The state of a run as others see it: the progress display, `GetStatus` and `Stop`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rollwire.coordinator.metrics import Metrics
from rollwire.serving.logs import get_logger
from rollwire.v1 import coordinator_pb2, weights_pb2

_log = get_logger(__name__)


class Observer(Protocol):
    """Is told what happens, as it happens. Must return quickly."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Training step number `step` (from 0) is done."""

    def on_validation(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        """A validation after `step` training steps is done; `kind` is `val` or `val_greedy`."""

    def on_notice(self, text: str) -> None:
        """Something a person should know, such as a server that was lost."""


@dataclass
class RunStatus:
    """Present state of one run; written by the run, read by everybody.

    Attributes:
        run_name: Name as configured.
        max_steps: Training steps that the run is to make.
        observer: Who is told.
        run_id: Identifier; empty until the run directory exists.
        epoch: Incarnation of this coordinator.
        address: `host:port` at which it answers; empty until it does.
        state: State.
        phase: What the run does now, for people.
        episodes_done: Episodes of this phase that have a result.
        episodes_total: Episodes that this phase plays; 0 when it plays none.
        step: Training steps done.
        version: Version that the learner has reached.
        latest: Latest value of every scalar.
        stop_cause: Why somebody asked to stop; None while nobody did.
        began: True once the servers are ready and fit together; before that nothing is recorded.
    """

    run_name: str
    max_steps: int
    observer: Observer
    run_id: str = ""
    epoch: int = 0
    address: str = ""
    state: coordinator_pb2.RunState.ValueType = coordinator_pb2.RUN_STATE_STARTING
    phase: str = "starting"
    episodes_done: int = 0
    episodes_total: int = 0
    step: int = 0
    version: weights_pb2.WeightVersion = field(default_factory=weights_pb2.WeightVersion)
    latest: Metrics = field(default_factory=dict)
    stop_cause: str | None = None
    began: bool = False
    _started: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started

    @property
    def ended(self) -> bool:
        """True once the run is over, well or badly."""
        return self.state in (coordinator_pb2.RUN_STATE_FINISHED, coordinator_pb2.RUN_STATE_FAILED)

    def begin_phase(self, phase: str, episodes_total: int = 0) -> None:
        """Starts a phase."""
        self.phase, self.episodes_done, self.episodes_total = phase, 0, episodes_total

    def count_episode(self) -> None:
        """Notes that an episode has a result."""
        self.episodes_done += 1

    def request_stop(self, cause: str) -> None:
        """Asks the run to end after the step in progress."""
        if self.ended or self.stop_cause is not None:
            return
        self.stop_cause = cause
        self.state = coordinator_pb2.RUN_STATE_STOPPING
        self.notice(f"stopping after the step in progress: {cause or 'no cause given'}")

    def notice(self, text: str) -> None:
        """Tells the log and the observer."""
        _log.warning(text)
        self.observer.on_notice(text)
