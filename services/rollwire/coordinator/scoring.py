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
        self._temperature = config.sampling.temperature
        self._timeout_s = config.timeouts.train_s
        self._budgets = budgets
        self._notice = notice

    async def reference_logprobs(self, samples: Sequence[learner_pb2.TrainSample]) -> list[npt.NDArray[np.float32]]:
        """Returns the reference's log-probabilities, float32[L] for each sample. Raises `RunError`."""
        scores = await self._score(samples, learner_pb2.SCORED_MODEL_REFERENCE)
        return [np.array(score.logprobs, np.float32) for score in scores]

    async def values(self, samples: Sequence[learner_pb2.TrainSample]) -> list[npt.NDArray[np.float32]]:
        """Returns the critic's predictions, float32[L] for each sample. Raises `RunError`."""
        scores = await self._score(samples, learner_pb2.SCORED_MODEL_CRITIC)
        return [np.array(score.values, np.float32) for score in scores]

    async def _score(
        self, samples: Sequence[learner_pb2.TrainSample], model: learner_pb2.ScoredModel.ValueType
    ) -> list[learner_pb2.SampleScore]:
        lost_since: float | None = None
        while True:
            try:
                stream = self._client.score(samples, self._temperature, model=model, timeout_s=self._timeout_s)
                scores = [score async for response in stream for score in response.scores]
                return self._checked(samples, scores)
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
        self, samples: Sequence[learner_pb2.TrainSample], scores: list[learner_pb2.SampleScore]
    ) -> list[learner_pb2.SampleScore]:
        """Returns the scores if they are those of the samples."""
        if [score.sample_id for score in scores] != [sample.sample_id for sample in samples]:
            raise RunError(
                f"the learner at {self._client.target} scored {len(scores)} samples in place of the {len(samples)} "
                "that it was sent, or others"
            )
        for sample, score in zip(samples, scores, strict=True):
            lengths = {len(score.logprobs), len(score.values)} - {0}
            if lengths != {len(sample.token_ids)}:
                raise RunError(
                    f"the learner at {self._client.target} scored {lengths or 'no'} tokens of the sample "
                    f"{sample.sample_id}, which has {len(sample.token_ids)}"
                )
        return scores

    def _text(self, what: str, error: RollwireError) -> str:
        return f"the learner at {self._client.target} {what} ({error})"
