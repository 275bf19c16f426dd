"""Asks the learner to score a batch's samples, again after a broken connection: scoring changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc
import numpy as np
import numpy.typing as npt

from rollwire.client.learner import LearnerClient
from rollwire.coordinator.budgets import Budgets
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.weight_push import LOST_CODES
from rollwire.rpc.errors import RollwireError
from rollwire.serving.config import RunConfig
from rollwire.v1 import learner_pb2


class SampleScorer:
    """Scores samples under the reference or the critic.

    Args:
        client: The learner.
        config: The run.
        budgets: Bounds of retries.
        notice: Tells people about a learner that does not answer.
    """

    def __init__(
        self, client: LearnerClient, config: RunConfig, budgets: Budgets, notice: Callable[[str], None]
    ) -> None:
        self._client = client
        self._temperature = config.training_temperature
        self._timeout_s = config.timeouts.train_s
        self._budgets = budgets
        self._notice = notice

    async def reference_logprobs(self, samples: Sequence[learner_pb2.TrainSample]) -> list[npt.NDArray[np.float32]]:
        """Returns the reference's log-probabilities, float32[L] for each sample. Raises `RunError`."""
        return self._checked("logprobs", samples, await self._score(samples, learner_pb2.SCORED_MODEL_REFERENCE))

    async def values(self, samples: Sequence[learner_pb2.TrainSample]) -> list[npt.NDArray[np.float32]]:
        """Returns the critic's predictions, float32[L] for each sample. Raises `RunError`."""
        return self._checked("values", samples, await self._score(samples, learner_pb2.SCORED_MODEL_CRITIC))

    async def _score(
        self, samples: Sequence[learner_pb2.TrainSample], model: learner_pb2.ScoredModel.ValueType
    ) -> list[learner_pb2.SampleScore]:
        lost_since: float | None = None
        while True:
            try:
                stream = self._client.score(samples, self._temperature, model=model, timeout_s=self._timeout_s)
                return [score async for response in stream for score in response.scores]
            except RollwireError as error:
                now = asyncio.get_running_loop().time()
                if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    limit = f"timeouts.train_s={self._timeout_s:g} s"
                    raise RunError(self._text(f"did not score a batch within {limit}; raise it", error)) from error
                if error.code not in LOST_CODES:
                    raise RunError(self._text("refused to score a batch", error)) from error
                if lost_since is None:
                    lost_since = now
                    self._notice(f"learner at {self._client.target} was lost ({error.message}); trying again")
                elif now - lost_since > self._budgets.lost_s:
                    raise RunError(self._text(f"was lost for more than {self._budgets.lost_s:g} s", error)) from error
            await asyncio.sleep(self._budgets.poll_s)

    def _checked(
        self, field: str, samples: Sequence[learner_pb2.TrainSample], scores: Sequence[learner_pb2.SampleScore]
    ) -> list[npt.NDArray[np.float32]]:
        """Returns one field of the scores if they are those of the samples, and finite."""
        here = f"the learner at {self._client.target}"
        if [score.sample_id for score in scores] != [sample.sample_id for sample in samples]:
            raise RunError(f"{here} scored {len(scores)} samples in place of the {len(samples)} it was sent, or others")
        found = [np.array(getattr(score, field), np.float32) for score in scores]
        for sample, values in zip(samples, found, strict=True):
            if len(values) != len(sample.token_ids):
                raise RunError(
                    f"{here} gave {len(values)} {field} for the sample {sample.sample_id}, which has "
                    f"{len(sample.token_ids)} tokens"
                )
            if not np.isfinite(values).all():
                raise RunError(f"{here} gave {field} for the sample {sample.sample_id} that are not finite")
        return found

    def _text(self, what: str, error: RollwireError) -> str:
        return f"the learner at {self._client.target} {what} ({error})"
