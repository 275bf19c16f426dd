"""Environments of gymnasium, real ones, as text."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
import pytest

from rollwire.environment.adapters.gymnasium import Gymnasium
from rollwire.environment.frozen_lake_map import generate_map

LAKE_WORDS = ["Left", "Down", "Right", "Up"]
TAXI_WORDS = ["South", "North", "East", "West", "Pickup", "Dropoff"]


def answer(word: object) -> str:
    return f"<answer>{word}</answer>"


def test_frozen_lake_is_played_to_the_goal() -> None:
    desc = generate_map(4, 0.8, 42).rows()
    lake = Gymnasium(
        "FrozenLake-v1", {"desc": desc, "is_slippery": False}, LAKE_WORDS, success_reward=1.0, instructions="Cross it."
    )
    observation, info = lake.reset(1)
    assert observation == "FFred[S]F\nFHFF\nFFFH\nGHFF"
    assert info == {"instructions": "Cross it.\nYour available actions are:\nLeft, Down, Right, Up"}
    replies = [lake.step(answer(word)) for word in ("left", "LEFT", "Down", "Down", "Down")]
    assert replies[0][0] == "  (Left)\nFred[F]SF\nFHFF\nFFFH\nGHFF"
    assert [reply[1:4] for reply in replies] == [(0.0, False, False)] * 4 + [(1.0, True, False)]
    assert [reply[4]["metrics"]["success"] for reply in replies] == [0.0] * 4 + [1.0]
    assert lake.max_turns == 100


def test_taxi_says_in_words_what_it_says_in_colours() -> None:
    taxi = Gymnasium("Taxi-v4", actions=TAXI_WORDS, format_penalty=-0.5, success_reward=20.0)
    observation, info = taxi.reset(7)
    assert all(mark in observation for mark in ("blue[", "magenta[", "yellow["))
    assert "\x1b" not in observation
    assert "South, North, East, West, Pickup, Dropoff" in info["instructions"]
    _, reward, *_ = taxi.step(answer("Pickup"))
    assert reward in (-10.0, -1.0)
    assert "\x1b" not in Gymnasium("Taxi-v4", colours="strip").reset(7)[0]
    assert "blue[" not in Gymnasium("Taxi-v4", colours="strip").reset(7)[0]


def test_cliff_walking_falls() -> None:
    cliff = Gymnasium("CliffWalking-v1", actions=["Up", "Right", "Down", "Left"], max_turns=30)
    assert cliff.reset(0)[0].splitlines()[3] == "x  C  C  C  C  C  C  C  C  C  C  T"
    assert cliff.step(answer("Right"))[1] == -100.0
    path = [cliff.step(answer(word)) for word in ["Up", *["Right"] * 11, "Down"]]
    assert (path[-1][1:3], path[-1][0].splitlines()[3][-1]) == ((-1.0, True), "x")


def test_blackjack_shows_its_state_through_a_template() -> None:
    template = "You have {0}, the dealer shows {1}."
    game = Gymnasium("Blackjack-v1", actions={"stick": 0, "hit": 1}, max_turns=20, observation_template=template)
    observation, _ = game.reset(5)
    state, _ = gymnasium.make("Blackjack-v1").reset(seed=5)
    assert observation == f"You have {state[0]}, the dealer shows {state[1]}."
    assert game.step(answer("stick"))[2] is True
    assert Gymnasium("Blackjack-v1", max_turns=20).reset(5)[0] == str([int(part) for part in state])


def test_observations_of_arrays_are_numbers() -> None:
    observation, _ = Gymnasium("CartPole-v1", actions=["left", "right"]).reset(0)
    assert len(np.array(eval(observation))) == 4


@pytest.mark.parametrize(
    "response", ["", "Left", answer("Jump"), answer(""), answer("Left, Left"), "<answer>" * 50_000]
)
def test_a_response_without_an_action_costs_the_penalty_and_changes_nothing(response: str) -> None:
    lake = Gymnasium("FrozenLake-v1", {"is_slippery": False}, LAKE_WORDS, format_penalty=-0.2)
    before, _ = lake.reset(1)
    observation, reward, terminated, truncated, info = lake.step(response)
    assert (observation, reward, terminated, truncated) == (before, -0.2, False, False)
    assert info["metrics"] == {"action_is_valid": 0.0, "format_penalty": -0.2}


def test_the_seed_decides_and_all_64_bits_are_taken() -> None:
    words = [answer(word) for word in ("Right", "Down", "Right", "Down", "Left")]

    def played(seed: int) -> list[str]:
        lake = Gymnasium("FrozenLake-v1", actions=LAKE_WORDS)
        shown = [lake.reset(seed)[0]]
        for word in words:
            observation, _, terminated, _, _ = lake.step(word)
            shown.append(observation)
            if terminated:
                break
        return shown

    assert played(2**64 - 1) == played(2**64 - 1)
    assert len({tuple(played(seed)) for seed in range(20)}) > 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"id": "FrozenLike-v1"}, "id is 'FrozenLike-v1': Environment `FrozenLike` doesn't exist. Did you mean"),
        ({"id": "Pendulum-v1"}, "Pendulum-v1 has the actions Box.*allowed: an environment with discrete actions"),
        ({"id": "Blackjack-v1"}, "max_turns is not set, and gymnasium has no limit for Blackjack-v1; set it"),
        ({"id": "FrozenLake-v1", "actions": ["a"]}, "actions has 1 words, but FrozenLake-v1 has 4 actions"),
        ({"id": "FrozenLake-v1", "actions": {"a": 4}}, "actions.a is 4; allowed: 0 to 3"),
        ({"id": "FrozenLake-v1", "actions": ["a", "A", "b", "c"]}, "allowed: different ones"),
        (
            {"id": "CartPole-v1", "observation": "ansi"},
            "CartPole-v1 draws itself only as human, rgb_array; use 'value'",
        ),
        ({"id": "CartPole-v1", "observation_template": "{9}"}, "does not fit an observation such as"),
        ({"id": "CartPole-v1", "action_pattern": "("}, "no regular expression"),
    ],
)
def test_what_does_not_fit_is_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Gymnasium(**settings)


def test_an_error_of_the_library_is_a_failure() -> None:
    lake = Gymnasium("FrozenLake-v1", actions=LAKE_WORDS)
    with pytest.raises(gymnasium.error.ResetNeeded):
        lake.step(answer("Left"))


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"pip install 'rollwire\[gymnasium\]'"):
        Gymnasium("FrozenLake-v1")
