"""Watches at every step that engine and learner give the same tokens the same log-probabilities.

Samples that the learner's present weights drew carry what is needed, and the learner measures them in its own forward
pass. With `max_staleness` above 0 most steps have none: their episodes were played before the last update, and the gap
would be what training changed. For such steps a rollout server draws a few tokens from prompts of the step before,
while the coordinator waits for episodes, and the learner scores them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from rollwire.client.learner import LearnerClient
from rollwire.client.rollout import RolloutClient
from rollwire.coordinator.batch import Batch
from rollwire.coordinator.comparable import Comparable
from rollwire.coordinator.logprob_gap import Bound, GapAlarm
from rollwire.coordinator.logprob_probe import Drawn, draw, gap_metrics, score
from rollwire.coordinator.metrics import Metrics
from rollwire.coordinator.rollout_pool import RolloutPool, ServerState
from rollwire.rpc.errors import RollwireError
from rollwire.serving.logs import get_logger
from rollwire.v1 import weights_pb2

_log = get_logger(__name__)
PROMPTS: Final = 4
"""Continuations that are drawn for a step without comparable samples."""
TOKENS: Final = 16
"""Most tokens of each of them."""
_TIMEOUT_S: Final = 60.0


class LogprobGuard:
    """Measures what the learner cannot measure by itself, and ends the run when the gap is too large.

    Args:
        pool: Rollout servers; they take turns.
        learner: The learner.
        bound: Largest mean gap.
        temperature: Temperature of training.
        probing: Draw tokens for steps without comparable samples; without staleness there are none.
    """

    def __init__(
        self, pool: RolloutPool, learner: LearnerClient, bound: Bound, temperature: float, *, probing: bool
    ) -> None:
        self._pool = pool
        self._learner = learner
        self._alarm = GapAlarm(bound)
        self._temperature = temperature
        self._probing = probing
        self._prompts: list[Sequence[int]] = []
        self._drawing: asyncio.Task[list[Drawn]] | None = None

    def comparable(self, version: weights_pb2.WeightVersion) -> Comparable:
        """Returns what a step from a version compares with."""
        return Comparable(version, self._temperature)

    def begin(self, step: int) -> None:
        """Has tokens drawn in case that the step will need them; all servers hold the learner's version."""
        ready = [server.client for server in self._pool.servers if server.state is ServerState.READY]
        if self._probing and self._prompts and ready:
            self._drawing = asyncio.create_task(self._draw(ready[step % len(ready)], step))

    async def measure(self, version: weights_pb2.WeightVersion, batch: Batch) -> Metrics:
        """Returns the gap of a step whose samples cannot be compared; nothing for others, or when it cannot be had.

        Args:
            version: Version that the learner has.
            batch: What it is going to train on.
        """
        prompts, drawing, self._drawing = self._prompts, self._drawing, None
        self._prompts = _prompts(batch)
        if drawing is None:
            return {}
        if any(sample.comparable_logprobs for sample in batch.samples) or not batch.samples:
            drawing.cancel()
            return {}
        try:
            drawn = await drawing
            scored, scored_by = await score(self._learner, drawn, temperature=self._temperature, timeout_s=_TIMEOUT_S)
        except RollwireError as error:  # whoever needs that server next finds out
            _log.warning("log-prob gap not measured", prompts=len(prompts), error=str(error))
            return {}
        versions = [seen for item in drawn for seen in item.versions] + [scored_by]
        if any(seen != version for seen in versions):
            _log.warning("log-prob gap not measured", error="the weights changed meanwhile")
            return {}
        return gap_metrics(drawn, scored)

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises `RunError` when a step's gap is too large."""
        self._alarm.check(step, metrics)

    async def close(self) -> None:
        """Ends what is being drawn."""
        if self._drawing is not None:
            self._drawing.cancel()
            with suppress(asyncio.CancelledError, RollwireError):
                await self._drawing

    async def _draw(self, client: RolloutClient, step: int) -> list[Drawn]:
        return await draw(
            client,
            self._prompts,
            temperature=self._temperature,
            max_tokens=TOKENS,
            seed=step * PROMPTS,
            timeout_s=_TIMEOUT_S,
        )


def _prompts(batch: Batch) -> list[Sequence[int]]:
    """Returns the first prompts of the first episodes of as many groups as are needed."""
    by_group = {trajectory.group_id: trajectory for trajectory in reversed(batch.consumed)}
    trajectories = list(reversed(by_group.values()))[:PROMPTS]
    return [
        trajectory.sequences[0].token_ids[: trajectory.turns[0].prompt.end]
        for trajectory in trajectories
        if trajectory.turns[0].prompt.end
    ]
