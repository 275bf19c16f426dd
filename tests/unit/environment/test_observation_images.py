"""Games that send a picture beside the text."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from rollwire.environment.frozen_lake import FrozenLake
from rollwire.environment.sokoban import LargerSokoban, Sokoban

GAMES = (FrozenLake, LargerSokoban)


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)))


@pytest.mark.parametrize("game", GAMES)
def test_each_observation_comes_with_the_picture_of_that_state(game: type[FrozenLake] | type[Sokoban]) -> None:
    played = game(observation_images=True)
    _, info = played.reset(42)
    assert (pixels(info["observation_png"]) == played.render_rgb()).all()
    for action in ("Left", "Right", "Up", "nonsense"):
        *_, info = played.step(f"<answer>{action}</answer>")
        assert (pixels(info["observation_png"]) == played.render_rgb()).all()
    assert "success" in info["metrics"]


@pytest.mark.parametrize("game", GAMES)
def test_without_the_option_there_is_none(game: type[FrozenLake] | type[Sokoban]) -> None:
    played = game()
    assert "observation_png" not in played.reset(42)[1]
    assert "observation_png" not in played.step("<answer>Left</answer>")[4]


@pytest.mark.parametrize(
    "played", [FrozenLake(size=64, observation_images=True), Sokoban((24, 24), 40, observation_images=True)]
)
def test_the_largest_picture_keeps_the_contracts_limit(played: FrozenLake | Sokoban) -> None:
    assert len(played.reset(1)[1]["observation_png"]) < 2**20
