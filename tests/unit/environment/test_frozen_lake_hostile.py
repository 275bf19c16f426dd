"""FrozenLake reads texts of strangers: its parser takes linear time and still agrees with the regular expressions."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.environment.answers import ANSWER_PATTERN, THINK_PATTERN
from rollwire.environment.frozen_lake import FrozenLake, FrozenLakeThink

PIECES = ["<answer>", "</answer>", "<think>", "</think>", " ", "\n", "Left", "up", "<", ">"]
HOSTILE = {
    "opening tags": "<answer>" * 100_000,
    "thoughts without end": "<think>" * 100_000,
    "thoughts and answers without end": "<think>" * 50_000 + "</think><answer>" * 30_000,
    "closing tag first": "</answer>" + "<answer>" * 100_000,
    "spaces": "<think></think>" + " " * 1_000_000 + "</answer>",
}


@pytest.mark.parametrize("game", [FrozenLake, FrozenLakeThink])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_megabyte_of_tags_is_read_at_once(game: type[FrozenLake], text: str) -> None:
    started = time.process_time()
    assert game().parse_action(text) is None
    # A search takes minutes on these; the limit only has to tell that apart from milliseconds.
    assert time.process_time() - started < 5


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_the_parser_agrees_with_a_search(text: str) -> None:
    for game, pattern in ((FrozenLake(), ANSWER_PATTERN), (FrozenLakeThink(), THINK_PATTERN)):
        found = re.search(pattern, text.strip(), re.DOTALL)
        word = (found.groups()[-1] if found else "").strip().lower()
        assert game.parse_action(text) == {"left": 0, "up": 3}.get(word)


def test_a_pattern_of_the_operator_is_searched() -> None:
    game = FrozenLake(action_pattern=r"move:(\w+)")
    assert game.parse_action("I think... move:Down now") == 1
