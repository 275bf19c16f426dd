"""Environments of GEM. gem-llm cannot be installed on Python 3.12.1 and later; there the message is what is tested."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollwire.environment.adapters.gem import Gem

installable = pytest.mark.skipif(sys.version_info[:3] > (3, 12, 0), reason="gem-llm excludes this Python")


def boxed(number: object) -> str:
    return f"\\boxed{{{number}}}"


def search(game: Gem, seed: int) -> list[Any]:
    """Halves the interval 1 to 10 until the number is found."""
    game.reset(seed)
    least, most = 1, 10
    replies = []
    while True:
        guess = (least + most) // 2
        replies.append(game.step(boxed(guess)))
        if replies[-1][2]:
            return replies
        least, most = (guess + 1, most) if "higher" in replies[-1][0] else (least, guess - 1)


@installable
def test_a_game_is_played() -> None:
    game = Gem("game:GuessTheNumber-v0-easy")
    observation, info = game.reset(3)
    assert observation.startswith("You are playing Guess The Number.")
    assert info == {"suffix": "Enter your next guess."}
    assert game.max_turns == 4
    replies = search(game, 3)
    assert replies[-1][1:3] == (1.0, True)
    assert [reply[4]["metrics"]["success"] for reply in replies] == [0.0] * (len(replies) - 1) + [1.0]
    assert replies == search(Gem("game:GuessTheNumber-v0-easy"), 3), "the seed decides"


@installable
def test_an_unusable_response_costs_what_gem_says() -> None:
    game = Gem("game:GuessTheNumber-v0-easy")
    game.reset(2**64 - 1)
    _, reward, terminated, _, info = game.step("seven")
    assert (reward, terminated, info["metrics"]) == (-0.1, True, {"success": 0.0})


@installable
def test_a_data_set_has_one_turn_and_a_random_game_draws_its_limit() -> None:
    questions = Gem("rg:leg_counting", {"size": 3})
    assert questions.max_turns == 1
    assert "legs" in questions.reset(1)[0]
    assert questions.step(boxed(0))[2:4] == (True, True)
    game = Gem("game:GuessTheNumber-v0-random")
    limits = set()
    for seed in range(20):
        game.reset(seed)
        limits.add(game.max_turns)
    assert len(limits) > 1
    assert Gem("game:GuessTheNumber-v0-random", max_turns=3).max_turns == 3


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "gem_games_of_a_user.py").write_text(
        """
import gem

class Echo(gem.Env):
    def reset(self, seed=None):
        super().reset(seed)
        return "say it", {"env_instruction": "Repeat."}

    def step(self, action):
        if action == "fail":
            raise RuntimeError("on request")
        metrics = {"length": len(action), "note": "x", "never": float("nan")}
        return action, 0.5, False, False, {"metrics": metrics, "metrics_agg_mode": {"length": "sum"}}

if "echo" not in gem.envs.registration.ENV_REGISTRY:
    gem.register("echo", "gem_games_of_a_user:Echo")
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("gem_games_of_a_user", None)


@installable
@pytest.mark.usefixtures("registered")
def test_environments_of_ones_own_keep_what_roll_reads() -> None:
    with pytest.raises(ValueError, match="max_turns is not set, and echo has no limit of its own; set it"):
        Gem("echo", modules=["gem_games_of_a_user"])
    echo = Gem("echo", modules=["gem_games_of_a_user"], max_turns=2)
    assert echo.reset(1) == ("say it", {"instructions": "Repeat."})
    observation, reward, _, _, info = echo.step("abc")
    assert (observation, reward) == ("abc", 0.5)
    assert info == {"metrics": {"success": 0.0, "length": 3}, "metrics_agg_mode": {"length": "sum"}}
    with pytest.raises(RuntimeError, match="on request"):
        echo.step("fail")


@installable
def test_an_unknown_id_is_named() -> None:
    with pytest.raises(
        ValueError, match="id is 'game:GuessTheNumber', which GEM does not know; did you mean game:Guess"
    ):
        Gem("game:GuessTheNumber")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(ImportError, match=r"pip install 'rollwire\[gem\]'"):
        Gem("game:GuessTheNumber-v0-easy")
