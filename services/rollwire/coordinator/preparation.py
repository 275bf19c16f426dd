"""Makes the batch of a step: selects, asks the learner for what the algorithm needs, assigns advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollwire.coordinator.batch import Batch, select_batch
from rollwire.coordinator.comparable import Comparable
from rollwire.coordinator.credit import assign
from rollwire.coordinator.divergence import next_coefficient
from rollwire.coordinator.scoring import SampleScorer
from rollwire.serving.config import RunConfig
from rollwire.v1 import trajectory_pb2


class BatchPreparer:
    """Prepares the batches of a run, one after another.

    Args:
        config: The run.
        scorer: Asks the learner.

    Attributes:
        kl_coefficient: Coefficient of the divergence in the next step. It follows from those before; a run that is
            resumed sets it.
    """

    def __init__(self, config: RunConfig, scorer: SampleScorer) -> None:
        self.kl_coefficient = config.algorithm.kl.coefficient
        self._config = config
        self._scorer = scorer

    async def prepare(
        self,
        groups: Sequence[Sequence[trajectory_pb2.Trajectory]],
        comparable: Comparable | None,
        lap: Callable[[str], None],
    ) -> Batch:
        """Returns the batch, ready to be trained.

        Args:
            groups: The step's groups by ascending index; each holds its trajectories by episode index.
            comparable: Marks the samples whose log-probabilities can be compared with the learner's.
            lap: Called with the name of each phase that has ended.

        Raises:
            RunError: The learner cannot score it.
        """
        config = self._config
        batch = select_batch(groups, config.algorithm, comparable)
        lap("step_adv")
        reference = values = None
        if batch.samples and config.needs_reference:
            reference = await self._scorer.reference_logprobs(batch.samples)
        if batch.samples and config.needs_critic:
            values = await self._scorer.values(batch.samples)
        if reference is not None or values is not None:
            lap("step_ref_log_probs_values_reward")
        assign(batch, config.algorithm, kl_coefficient=self.kl_coefficient, reference=reference, values=values)
        if reference is not None:
            measured, episodes = batch.metrics["critic/kl"], len(batch.trained)
            self.kl_coefficient = next_coefficient(self.kl_coefficient, measured, episodes, config.algorithm.kl)
        lap("step_adv")
        return batch
