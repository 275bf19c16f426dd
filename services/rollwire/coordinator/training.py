"""Asks the learner for one training step, again after a broken connection: the step is idempotent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc

from rollwire.client.learner import LearnerClient
from rollwire.coordinator.budgets import Budgets
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.objective import loss_settings
from rollwire.coordinator.seeds import shuffle_seed
from rollwire.coordinator.weight_push import LOST_CODES
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.versions import version_text
from rollwire.serving.config import RunConfig
from rollwire.v1 import learner_pb2, trajectory_pb2, weights_pb2


class StepTrainer:
    """Trains the steps of a run.

    Args:
        client: The learner.
        config: The run.
        fence: Identifies this coordinator.
        budgets: Bounds of retries.
        notice: Tells people about a learner that does not answer.
    """

    def __init__(
        self,
        client: LearnerClient,
        config: RunConfig,
        fence: trajectory_pb2.Fence,
        budgets: Budgets,
        notice: Callable[[str], None],
    ) -> None:
        self._client = client
        self._config = config
        self._fence = fence
        self._budgets = budgets
        self._notice = notice

    async def train(
        self,
        step: int,
        base: weights_pb2.WeightVersion,
        samples: Sequence[learner_pb2.TrainSample],
        kl_coefficient: float = 0.0,
    ) -> learner_pb2.TrainResponse:
        """Runs step number `step` on the learner, which must be at version `base`.

        While the critic warms up the policy stays as it is.

        Raises:
            RunError: The learner refuses the step, was lost for too long, or was restarted.
        """
        header = learner_pb2.TrainHeader(
            fence=self._fence,
            base_version=base,
            loss=loss_settings(self._config, kl_coefficient),
            optimizer_steps=self._config.learner.optimizer_steps_per_batch,
            shuffle_seed=shuffle_seed(self._config.run.seed, step),
            train_critic=self._config.needs_critic,
            freeze_policy=step < self._config.learner.critic.warmup_steps,
        )
        response = await self._train_until_answered(header, samples)
        wanted = weights_pb2.WeightVersion(lineage=base.lineage, step=base.step + 1)
        if response.version != wanted:
            raise RunError(
                f"the learner at {self._client.target} answered a step from {version_text(base)} with version "
                f"{version_text(response.version)}; it must be {version_text(wanted)}"
            )
        return response

    async def _train_until_answered(
        self, header: learner_pb2.TrainHeader, samples: Sequence[learner_pb2.TrainSample]
    ) -> learner_pb2.TrainResponse:
        """Calls Train, again after a lost connection or while the learner still runs this step."""
        loop = asyncio.get_running_loop()
        step_end = loop.time() + self._config.timeouts.train_s
        lost_since: float | None = None
        while True:
            try:
                return await self._client.train(header, samples, timeout_s=self._config.timeouts.train_s)
            except RollwireError as error:
                if error.reason == Reason.STEP_IN_PROGRESS and loop.time() < step_end:
                    lost_since = None
                elif error.code in LOST_CODES:
                    if lost_since is None:
                        lost_since = loop.time()
                        self._notice(f"learner at {self._client.target} was lost ({error.message}); trying again")
                    elif loop.time() - lost_since > self._budgets.lost_s:
                        raise RunError(
                            self._text(f"was lost for more than {self._budgets.lost_s:g} s", error)
                        ) from error
                else:
                    raise self._final_error(header, error) from error
            await asyncio.sleep(self._budgets.poll_s)

    def _final_error(self, header: learner_pb2.TrainHeader, error: RollwireError) -> RunError:
        if error.reason == Reason.WRONG_VERSION:
            return RunError(
                self._text(f"is no longer at version {version_text(header.base_version)}; was it restarted?", error)
            )
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            limit = f"timeouts.train_s={self._config.timeouts.train_s:g} s"
            return RunError(self._text(f"did not finish a step within {limit}; raise it", error))
        return RunError(self._text("refused a training step", error))

    def _text(self, what: str, error: RollwireError) -> str:
        return f"the learner at {self._client.target} {what} ({error})"
