"""Logs what a step produced: scalars, episode texts, and the status that others read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rollwire.coordinator.logged import Logged
from rollwire.coordinator.metrics import finite_metrics
from rollwire.coordinator.status import RunStatus
from rollwire.coordinator.tracking import Tracker
from rollwire.coordinator.transcripts import Transcripts
from rollwire.serving.logs import get_logger
from rollwire.v1 import trajectory_pb2

_log = get_logger(__name__)


class Recorder:
    """Writes to the tracker outside of the event loop's thread, one write after the other.

    Args:
        tracker: Event file and `metrics.jsonl`.
        transcripts: Renders episodes; None when no texts are wanted.
        status: Gets the latest value of every scalar.
        text_every_steps: Texts are written every so many steps.
    """

    def __init__(
        self, tracker: Tracker, transcripts: Transcripts | None, status: RunStatus, text_every_steps: int
    ) -> None:
        self._tracker = tracker
        self._transcripts = transcripts
        self._status = status
        self._text_every_steps = text_every_steps

    async def go_on(self, logged: Logged) -> None:
        """Continues what an earlier incarnation logged. Raises `RunError` when the disk refuses."""
        await asyncio.to_thread(self._tracker.go_on, logged)

    async def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes scalars. Raises `RunError` when the disk refuses."""
        values = finite_metrics(metrics)
        self._status.latest.update(values)
        await asyncio.to_thread(self._tracker.log_scalars, step, values)
        _log.info("metrics", step=step, **values)

    async def texts(self, step: int, trajectories: Sequence[trajectory_pb2.Trajectory]) -> None:
        """Writes the best and the worst episode of a step as text, when texts are due."""
        transcripts = self._transcripts
        if transcripts is None or not transcripts.available or step % self._text_every_steps:
            return
        by_score = sorted(trajectories, key=lambda trajectory: trajectory.score)
        for name, trajectory in zip(("worst", "best"), (by_score[0], by_score[-1]), strict=True):
            text = await asyncio.to_thread(transcripts.render, trajectory)
            await asyncio.to_thread(self._tracker.log_text, step, f"episode/{name}", text)
