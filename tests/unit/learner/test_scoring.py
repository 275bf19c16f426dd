"""Scores of whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rollwire.learner.batching import Budget
from rollwire.learner.model import Policy
from rollwire.learner.samples import Sample, ScoredSequence
from rollwire.learner.scoring import score


def test_scores_lie_at_the_masked_positions_in_the_order_of_the_sequences(
    make_model: Callable[..., Any], make_samples: Callable[..., list[Sample]]
) -> None:
    policy = Policy(make_model(), torch.device("cpu"), "float32")
    sequences: list[ScoredSequence] = list(make_samples(6))
    sequences.insert(2, ScoredSequence("nothing wanted", np.array([1, 2, 3]), np.zeros(3, dtype=bool)))

    together = score(policy, sequences, 1.0, Budget(64, 16))

    for sequence, (logprobs, entropies) in zip(sequences, together, strict=True):
        assert logprobs.shape == entropies.shape == sequence.token_ids.shape
        assert not logprobs[~sequence.loss_mask].any() and not entropies[~sequence.loss_mask].any()
        assert (logprobs[sequence.loss_mask] < 0).all() and (entropies[sequence.loss_mask] > 0).all()
        alone = score(policy, [sequence], 1.0, Budget(64, 16))[0]
        np.testing.assert_allclose(logprobs, alone[0], atol=1e-5)
        np.testing.assert_allclose(entropies, alone[1], atol=1e-5)
