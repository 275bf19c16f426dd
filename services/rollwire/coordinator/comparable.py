"""Which recorded log-probabilities the learner's own must equal but for rounding. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from rollwire.v1 import trajectory_pb2, weights_pb2

_FLOAT32: Final = 1e-6


@dataclass(frozen=True)
class Comparable:
    """What a step compares with.

    The learner computes the whole distribution at one temperature. An engine that cut it with top-p or top-k reports
    probabilities of what was left, and greedy drawing reports 1: neither says anything about the weights.

    Attributes:
        version: Weights that the learner has.
        temperature: Temperature of its log-probabilities.
    """

    version: weights_pb2.WeightVersion
    temperature: float

    def covers(self, trajectory: trajectory_pb2.Trajectory, sequence: trajectory_pb2.TokenSequence) -> bool:
        """Returns whether these weights drew all sampled tokens of a sequence from this very distribution."""
        return self.same_distribution(trajectory.sampling) and all(
            span.version == self.version for span in sequence.version_spans
        )

    def same_distribution(self, sampling: trajectory_pb2.SamplingSettings) -> bool:
        """Returns whether log-probabilities under these settings are those of the whole distribution."""
        temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
        unfiltered = sampling.top_k == 0 and (not sampling.HasField("top_p") or sampling.top_p == 1)
        if sampling.logprob_mode == trajectory_pb2.LOGPROB_MODE_RAW:
            return self.temperature == 1  # whatever was drawn how, these are of the whole distribution at 1
        return (
            sampling.logprob_mode == trajectory_pb2.LOGPROB_MODE_SAMPLED
            and unfiltered
            and temperature > 0
            and math.isclose(temperature, self.temperature, rel_tol=_FLOAT32)
        )
