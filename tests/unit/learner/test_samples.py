"""Padding and the place of each prediction."""

from __future__ import annotations

import numpy as np
import torch

from rollwire.learner.samples import ScoredSequence, at_targets, pad


def sequence(token_ids: list[int], loss_mask: list[int]) -> ScoredSequence:
    return ScoredSequence("s", np.array(token_ids), np.array(loss_mask, dtype=bool))


def test_padding_keeps_only_tokens_that_predict_something() -> None:
    long = sequence([5, 6, 7, 8, 9], [0, 0, 1, 1, 0])
    short = sequence([3, 4], [0, 1])

    batch = pad([long, short], torch.device("cpu"))

    assert batch.input_ids.tolist() == [[5, 6, 7], [3, 0, 0]]
    assert batch.sources.tolist() == [1, 2, 3]
    assert batch.targets.tolist() == [7, 8, 4]


def test_values_at_targets_have_the_order_of_the_targets() -> None:
    sequences = [sequence([5, 6, 7], [0, 1, 1]), sequence([3, 4], [0, 1])]
    values = [np.array([0, 1, 2], dtype=np.float32), np.array([3, 4], dtype=np.float32)]

    assert at_targets(values, sequences).tolist() == [1, 2, 4]


def test_a_sequence_without_targets_needs_no_tokens() -> None:
    assert sequence([5, 6], [0, 0]).input_tokens == 0
    assert sequence([5, 6, 7], [0, 1, 0]).input_tokens == 1
