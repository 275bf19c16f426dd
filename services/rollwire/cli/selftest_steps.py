"""The steps of `rollwire selftest weights` against a learner and a rollout server that run.

Version 0, then the version after a step that changes the weights, then the one after a step with learning rate 0. Each
time the engine draws tokens and the learner scores them, and the engine's weights are read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from rollwire.cli.selftest_report import Report, Stage
from rollwire.client.learner import LearnerClient
from rollwire.client.rollout import RolloutClient
from rollwire.coordinator.budgets import Budgets
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.logprob_gap import Bound
from rollwire.coordinator.logprob_probe import Drawn, draw, gap_metrics, samples_of, score
from rollwire.coordinator.weight_check import WeightVerifier
from rollwire.coordinator.weight_push import ServerLostError, WeightPusher
from rollwire.rpc.ids import new_id
from rollwire.rpc.versions import version_text
from rollwire.serving.config import RunConfig
from rollwire.v1 import learner_pb2, trajectory_pb2, weights_pb2

LEARNING_RATE: Final = 1e-4
"""Of the step that changes the weights. Every weight moves by about as much: far more than in a run, and visible."""

SETTINGS: Final = (
    "run.name=selftest-weights",
    # Two optimizer steps, the first at the peak of the schedule and the second, its last, at 0.
    "run.max_steps=2",
    "learner.optimizer_steps_per_batch=1",
    f"learner.optimizer.learning_rate={LEARNING_RATE}",
    "learner.optimizer.schedule=linear",
    "learner.optimizer.warmup_steps=0",
    "learner.optimizer.final_learning_rate_ratio=0",
)
"""What the test needs, whatever the configuration says."""

DEFAULTS: Final = ("rollout.same_host_weights=false",)
"""What it needs unless told otherwise: weights go through the network, whole and as changes, as between hosts."""

OTHER_TEMPERATURE: Final = 0.7
_BUDGETS: Final = Budgets(attempts=1, lost_s=5.0)


class WeightSelftest:
    """Runs the steps once.

    Args:
        config: The run, with `SETTINGS`.
        learner: Learner at version 0.
        rollout: Rollout server without weights.
        prompts: Token ids.
        max_tokens: Most tokens of a continuation.
        bound: Largest mean gap.
    """

    def __init__(
        self,
        config: RunConfig,
        learner: LearnerClient,
        rollout: RolloutClient,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        bound: Bound,
    ) -> None:
        self._config = config
        self._learner = learner
        self._rollout = rollout
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._fence = trajectory_pb2.Fence(run_id=new_id("selftest"), epoch=1)
        usual = config.sampling.temperature
        self._temperatures = (usual, OTHER_TEMPERATURE if usual != OTHER_TEMPERATURE else 1.0)
        self.report = Report(bound)

    async def run(self) -> Report:
        """Returns the report; it ends with the first stage at which something is wrong.

        Raises:
            RollwireError: The learner or the rollout server refuses, or is lost.
            RunError: The weights changed in between.
        """
        info = await self._learner.get_info()
        drawn = await self._stage("version 0", info.version, info.digest)
        if self._ended():
            return self.report
        before, _ = await self._score(drawn, self._temperatures[0])
        answer = await self._train(info.version, drawn)
        after, _ = await self._score(drawn, self._temperatures[0])
        self.report.moved = float(np.abs(after - before).mean())
        drawn = await self._stage("after a step", answer.version, answer.digest)
        if not self._ended():
            answer = await self._train(answer.version, drawn)
            await self._stage("after a step at rate 0", answer.version, answer.digest)
        return self.report

    def _ended(self) -> bool:
        last = self.report.stages[-1]
        return bool(last.fault) or not last.within(self.report.bound)

    async def _stage(self, name: str, version: weights_pb2.WeightVersion, digest: bytes) -> list[Drawn]:
        """Activates a version, measures, reads back; returns what was drawn at the usual temperature."""
        stage = Stage(name, digest=digest)
        self.report.stages.append(stage)
        timeout_s = self._config.timeouts.update_s
        pusher = WeightPusher(self._fence, self._learner.target, timeout_s, _BUDGETS)
        verifier = WeightVerifier(self._fence, timeout_s, _BUDGETS, notice=lambda text: None)
        usual: list[Drawn] = []
        try:
            record = await pusher.activate(self._rollout, version, digest)
            stage.received_bytes = record.received_bytes
            for temperature in self._temperatures:
                drawn = await self._compare(stage, version, temperature)
                usual = usual or drawn
            await verifier.verify(self._rollout, version, digest)
        except (RunError, ServerLostError) as error:
            stage.fault = str(error)
        return usual

    async def _compare(self, stage: Stage, version: weights_pb2.WeightVersion, temperature: float) -> list[Drawn]:
        drawn = await draw(
            self._rollout,
            self._prompts,
            temperature=temperature,
            max_tokens=self._max_tokens,
            seed=self._config.run.seed,
            timeout_s=self._config.timeouts.group_s,
        )
        scored, scored_by = await self._score(drawn, temperature)
        stage.gaps[temperature] = gap_metrics(drawn, scored)
        for seen in [scored_by, *(seen for item in drawn for seen in item.versions)]:
            if seen != version:
                raise RunError(f"{version_text(seen)} answered instead of {version_text(version)}")
        return drawn

    async def _score(self, drawn: Sequence[Drawn], temperature: float) -> tuple[np.ndarray, weights_pb2.WeightVersion]:
        timeout_s = self._config.timeouts.train_s
        return await score(self._learner, drawn, temperature=temperature, timeout_s=timeout_s)

    async def _train(self, base: weights_pb2.WeightVersion, drawn: Sequence[Drawn]) -> learner_pb2.TrainResponse:
        """Makes every other continuation likelier and the rest unlikelier."""
        header = learner_pb2.TrainHeader(
            fence=self._fence,
            base_version=base,
            loss=learner_pb2.LossSettings(clip_low=0.2, clip_high=0.2, temperature=self._temperatures[0]),
            optimizer_steps=1,
        )
        samples = samples_of(drawn, [1.0 if number % 2 == 0 else -1.0 for number in range(len(drawn))])
        return await self._learner.train(header, samples, timeout_s=self._config.timeouts.train_s)
