"""Drawing tokens: frequencies, filters, log-probabilities, independence of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollwire.rollout.engine import Sampling
from rollwire.rollout.engines.sampler import Draw, draw_tokens
from rollwire.v1 import trajectory_pb2

RAW = trajectory_pb2.LOGPROB_MODE_RAW
SAMPLED = trajectory_pb2.LOGPROB_MODE_SAMPLED


def sampling(**changes: Any) -> Sampling:
    settings: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": 1,
        "stop_token_ids": frozenset(),
        "logprob_mode": SAMPLED,
    }
    return Sampling(**{**settings, **changes})


def many(
    logits: list[float], count: int, wide: torch.dtype = torch.float64, **changes: Any
) -> tuple[np.ndarray, np.ndarray]:
    rows = torch.tensor(logits).repeat(count, 1)
    tokens, logprobs = draw_tokens(rows, [Draw(sampling(**changes), 7, index) for index in range(count)], wide)
    return np.array(tokens), np.array(logprobs)


@pytest.mark.parametrize("wide", [torch.float64, torch.float32])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_are_those_of_the_distribution(temperature: float, wide: torch.dtype) -> None:
    logits = [0.0, 1.0, -1.0, 2.0, 0.5, -30.0]
    count = 20_000
    tokens, logprobs = many(logits, count, wide, temperature=temperature)
    expected = torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, 0).numpy()
    seen = np.bincount(tokens, minlength=6)
    usual = expected > 1e-4
    chi_square = ((seen[usual] - count * expected[usual]) ** 2 / (count * expected[usual])).sum()
    assert chi_square < 22  # 5 degrees of freedom, p < 0.001
    assert np.allclose(logprobs, np.log(expected[tokens]), atol=1e-5)


def test_top_k_keeps_k_and_renormalises() -> None:
    tokens, logprobs = many([1.0, 3.0, 2.0, 0.0], 2000, top_k=2)
    assert set(tokens) == {1, 2}
    kept = torch.log_softmax(torch.tensor([3.0, 2.0]), 0)
    assert np.allclose(logprobs, [float(kept[0]) if token == 1 else float(kept[1]) for token in tokens], atol=1e-6)


def test_top_k_of_equal_logits_keeps_the_lowest_ids() -> None:
    tokens, logprobs = many([1.0, 1.0, 1.0, 1.0], 500, top_k=3)
    assert set(tokens) == {0, 1, 2}
    assert np.allclose(logprobs, -np.log(3), atol=1e-6)


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    tokens, _ = many([1.0, 1.0, 1.0], 500, top_k=1000)
    assert set(tokens) == {0, 1, 2}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.5, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (0.05, {0}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p: float, kept: set[int]) -> None:
    probabilities = [0.5, 0.25, 0.2, 0.05]
    tokens, logprobs = many([float(np.log(p)) for p in probabilities], 3000, top_p=top_p)
    assert set(tokens) == kept
    mass = sum(probabilities[token] for token in kept)
    assert np.allclose(logprobs, [np.log(probabilities[token] / mass) for token in tokens], atol=1e-5)


def test_top_p_applies_to_what_top_k_left() -> None:
    # Of the two kept tokens the first has 0.5 / 0.75 = 0.67 of the mass, which reaches 0.6.
    tokens, logprobs = many([float(np.log(p)) for p in (0.5, 0.25, 0.2, 0.05)], 500, top_k=2, top_p=0.6)
    assert set(tokens) == {0}
    assert np.allclose(logprobs, 0.0, atol=1e-6)


def test_greedy_takes_the_lowest_id_among_equals_and_is_certain() -> None:
    tokens, logprobs = many([0.0, 5.0, 5.0, 1.0], 50, temperature=0.0)
    assert set(tokens) == {1} and set(logprobs) == {0.0}


def test_raw_log_probabilities_ignore_temperature_and_filters() -> None:
    logits = [0.3, 1.2, -0.4, 0.9]
    expected = torch.log_softmax(torch.tensor(logits), 0).numpy()
    for changes in ({"temperature": 0.3}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.4}):
        tokens, logprobs = many(logits, 50, logprob_mode=RAW, **changes)
        assert np.allclose(logprobs, expected[tokens], atol=1e-6)


def test_a_tiny_temperature_is_nearly_greedy_and_finite() -> None:
    tokens, logprobs = many([1.0, 1.5, 1.4], 50, temperature=1e-38)
    assert set(tokens) == {1} and np.isfinite(logprobs).all()


def test_rows_do_not_depend_on_the_rest_of_the_batch() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 300, generator=random)
    settings = [
        sampling(),
        sampling(temperature=0.7),
        sampling(temperature=0.0),
        sampling(top_k=5),
        sampling(top_p=0.8, temperature=1.3),
        sampling(logprob_mode=RAW, top_k=9),
    ]
    draws = [Draw(settings[row % len(settings)], 1000 + row, row) for row in range(40)]
    together = draw_tokens(logits, draws, torch.float64)
    for row in range(40):
        alone = draw_tokens(logits[row : row + 1], [draws[row]], torch.float64)
        assert alone[0][0] == together[0][row]
        assert alone[1][0] == pytest.approx(together[1][row], abs=1e-6)


def test_seed_and_position_decide() -> None:
    logits = torch.zeros(1, 1000)

    def draw(seed: int, index: int) -> int:
        return draw_tokens(logits, [Draw(sampling(), seed, index)], torch.float64)[0][0]

    assert draw(5, 3) == draw(5, 3)
    assert len({draw(seed, index) for seed in range(10) for index in range(10)}) > 80


def test_rows_of_nan_are_marked_and_spoil_no_other_row() -> None:
    logits = torch.tensor([[0.0, 1.0], [float("nan"), 1.0], [2.0, 0.0]])
    tokens, logprobs = draw_tokens(logits, [Draw(sampling(), 1, row) for row in range(3)], torch.float64)
    assert np.isnan(logprobs[1]) and np.isfinite([logprobs[0], logprobs[2]]).all()
    assert all(0 <= token < 2 for token in tokens)
