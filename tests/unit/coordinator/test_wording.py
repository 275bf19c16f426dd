from __future__ import annotations

import pytest

from rollwire.coordinator.wording import counted, did_you_mean

KNOWN = ("FrozenLake", "FrozenLakeThink", "Sokoban", "SimpleSokoban")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("FrozenLak", "FrozenLake"), ("frozenlake", "FrozenLake"), ("Sokobann", "Sokoban"), ("Riddles", ""), ("x", "")],
)
def test_a_name_that_is_much_like_another(name: str, meant: str) -> None:
    assert did_you_mean(name, KNOWN) == (f" (did you mean {meant}?)" if meant else "")
    assert did_you_mean(name, ()) == ""


def test_numbers_have_their_nouns() -> None:
    assert (counted(1, "step"), counted(1280, "step"), counted(2, "entry", "entries")) == (
        "1 step",
        "1,280 steps",
        "2 entries",
    )
