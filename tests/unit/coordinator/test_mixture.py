from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollwire.coordinator.mixture import Mixture
from rollwire.serving.config.environments import TrainEnvironment


def environments(*weights: float) -> list[TrainEnvironment]:
    return [TrainEnvironment(tag=f"E{position}", weight=weight) for position, weight in enumerate(weights)]


def test_equal_weights_alternate() -> None:
    mixture = Mixture(environments(1, 1))
    assert [mixture.environment(index).tag for index in range(4)] == ["E0", "E1", "E0", "E1"]


@given(st.lists(st.floats(0.05, 20), min_size=1, max_size=5), st.integers(1, 200))
def test_counts_follow_the_weights_within_one_group_each(weights: list[float], groups: int) -> None:
    mixture = Mixture(environments(*weights))
    counts = Counter(mixture.environment(index).tag for index in range(groups))
    for position, weight in enumerate(weights):
        assert abs(counts[f"E{position}"] - groups * weight / sum(weights)) <= len(weights)


def test_the_order_of_questions_does_not_matter() -> None:
    forwards, backwards = Mixture(environments(3, 1, 2)), Mixture(environments(3, 1, 2))
    assert [forwards.environment(index) for index in range(30)] == [
        backwards.environment(index) for index in reversed(range(30))
    ][::-1]


def test_an_entry_with_weight_0_never_comes() -> None:
    mixture = Mixture(environments(0, 2, 0, 1))
    assert Counter(mixture.environment(index).tag for index in range(30)) == {"E1": 20, "E3": 10}
