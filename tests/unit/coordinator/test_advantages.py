from __future__ import annotations

import math
import typing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.coordinator.advantages import ESTIMATORS, group_advantages, is_without_signal
from rollwire.serving.config.sections import AlgorithmSection

SCORES = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def plain_grpo(scores: list[float]) -> list[float]:
    mean = sum(scores) / len(scores)
    std = math.sqrt(sum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
    return [0.0 if std <= 1e-6 else (score - mean) / (std + 1e-6) for score in scores]


def plain_dr_grpo(scores: list[float]) -> list[float]:
    return [score - sum(scores) / len(scores) for score in scores]


def plain_rloo(scores: list[float]) -> list[float]:
    result = []
    for position, score in enumerate(scores):
        others = scores[:position] + scores[position + 1 :]
        result.append(score - sum(others) / len(others))
    return result


PLAIN = {"grpo": plain_grpo, "dr_grpo": plain_dr_grpo, "rloo": plain_rloo, "reinforce": lambda scores: scores}


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(scores=SCORES)
def test_against_plain_loops(name: str, scores: list[float]) -> None:
    expected = PLAIN[name](scores)
    if name == "grpo" and np.std(scores, ddof=1) < 1e-5:
        return  # near the threshold rounding decides between 0 and a value
    np.testing.assert_allclose(group_advantages(name, scores), expected, rtol=1e-9, atol=1e-9)


def test_known_values() -> None:
    np.testing.assert_allclose(group_advantages("grpo", [1, 0, 0, 0]), [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
    np.testing.assert_allclose(group_advantages("dr_grpo", [1, 0, 0, 0]), [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(group_advantages("rloo", [1, 0, 0, 0]), [1, -1 / 3, -1 / 3, -1 / 3])
    np.testing.assert_allclose(group_advantages("reinforce", [1, 0, 0.5]), [1, 0, 0.5])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(value=st.floats(-100, 100), size=st.integers(2, 64))
def test_equal_scores_carry_no_signal(name: str, value: float, size: int) -> None:
    advantages = group_advantages(name, [value] * size)
    assert is_without_signal(advantages)
    assert name != "grpo" or not advantages.any()


def test_reinforce_learns_from_equal_scores_unless_they_are_zero() -> None:
    assert not is_without_signal(group_advantages("reinforce", [1.0, 1.0]))
    assert is_without_signal(group_advantages("reinforce", [0.0, 0.0]))


def test_a_single_episode_can_be_reinforced() -> None:
    assert group_advantages("reinforce", [2.0]).tolist() == [2.0]


def test_the_configuration_offers_exactly_the_registered_estimators() -> None:
    offered = typing.get_args(AlgorithmSection.model_fields["advantage"].annotation)
    assert set(offered) == set(ESTIMATORS)
