"""Questions of reasoning-gym."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import reasoning_gym

from rollwire.environment.adapters.libraries import seed_of_32_bits
from rollwire.environment.adapters.reasoning_gym import ReasoningGym


def test_the_right_answer_pays_and_the_seed_decides_the_question() -> None:
    game = ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 3})
    for seed in (0, 5, 2**64 - 1):
        question, info = game.reset(seed)
        entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=seed_of_32_bits(seed), min_terms=2, max_terms=3)[
            0
        ]
        assert question == entry["question"]
        assert info["instructions"].endswith("<answer>your answer</answer>")
        _, reward, terminated, truncated, info = game.step(f"I think\n<answer> {entry['answer']} </answer>")
        assert (reward, terminated, truncated) == (1.0, True, False)
        assert info["metrics"] == {"action_is_valid": 1.0, "format_penalty": 0.0, "score": 1.0, "success": 1.0}


@pytest.mark.parametrize("dataset", ["list_functions", "pool_matrix", "countdown"])
def test_data_sets_that_draw_from_global_generators_follow_the_seed_and_disturb_nobody(dataset: str) -> None:
    random.seed(1)
    expected = [random.random() for _ in range(4)]
    random.seed(1)
    drawn = []
    questions = []
    for seed in (3, 4, 3):
        questions.append(ReasoningGym(dataset).reset(seed)[0])
        drawn.append(random.random())
    assert questions[0] == questions[2] != questions[1]
    assert drawn == expected[:3]


def test_a_wrong_answer_pays_nothing_and_none_costs_the_penalty() -> None:
    game = ReasoningGym("chain_sum", format_penalty=-0.3)
    game.reset(1)
    assert game.step("<answer>none</answer>")[1] == 0.0
    game.reset(1)
    _, reward, terminated, _, info = game.step("42")
    assert (reward, terminated) == (-0.3, True)
    assert info["metrics"] == {"action_is_valid": 0.0, "format_penalty": -0.3, "score": 0.0, "success": 0.0}


def test_a_score_may_be_a_part() -> None:
    game = ReasoningGym("countdown")
    game.reset(7)
    _, reward, _, _, info = game.step("<answer>1 + 1</answer>")
    assert 0 < reward < 1 and info["metrics"]["success"] == 0.0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"dataset": "leg_count"},
            "dataset is 'leg_count', which reasoning-gym does not know; did you mean leg_counting",
        ),
        ({"dataset": "chain_sum", "dataset_options": {"terms": 2}}, "which chain_sum refuses.*'terms'"),
        ({"dataset": "chain_sum", "dataset_options": {"min_terms": -1}}, "min_terms must be positive"),
        ({"dataset": "chain_sum", "dataset_options": {"seed": 1}}, "dataset_options.seed is set; allowed: not at all"),
    ],
)
def test_what_does_not_fit_is_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ReasoningGym(**settings)


def test_an_error_of_the_scorer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    game = ReasoningGym("chain_sum")
    game.reset(1)
    monkeypatch.setattr(game._source, "score_answer", lambda answer, entry: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        game.step("<answer>1</answer>")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install 'rollwire\[reasoning-gym\]'"):
        ReasoningGym("chain_sum")
