"""The prompt texts are a contract with policies trained elsewhere: every character counts."""

import pytest

from rollwire.rollout.prompts import PromptTemplates

LAKE = "__P_\n_O__\n___O\nGO__"
TURN_3 = """Turn 3:
Observation:
__P_
_O__
___O
GO__
Strictly follow this format:
1. output format is '<answer> [your answer] </answer>' with no extra text.\x20
2. You have 8 actions left.\x20
3. Max response length: 128 words (tokens).
Decide the next action:
"""
SYSTEM = "You're a helpful assistant. You are a good game player. You are aiming to get high reward in the game."


def test_first_messages_are_system_then_instructions_with_the_first_turn() -> None:
    messages = PromptTemplates().first_messages("Play well.", LAKE, 2, 8, 128)
    assert messages == [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Play well.\n" + TURN_3},
    ]


def test_next_messages_are_the_turn_alone() -> None:
    messages = PromptTemplates().next_messages(LAKE, 2, 8, 128)
    assert messages == [{"role": "user", "content": TURN_3}]


def test_turn_index_0_prints_as_turn_1() -> None:
    [message] = PromptTemplates().next_messages(LAKE, 0, 10, 128)
    assert message["content"].startswith("Turn 1:\n")


def test_empty_system_and_empty_instructions_leave_no_trace() -> None:
    messages = PromptTemplates(system="").first_messages("", LAKE, 2, 8, 128)
    assert messages == [{"role": "user", "content": TURN_3}]


def test_templates_can_be_overridden() -> None:
    prompts = PromptTemplates(system="S", turn="{observation}{suffix}")
    messages = prompts.first_messages("I", "{braces stay}", 0, 1, 1, suffix="!")
    assert messages[1]["content"] == "I\n{braces stay}!"


@pytest.mark.parametrize("field", ["obs", "", "0"])
def test_unknown_field_names_what_is_allowed(field: str) -> None:
    with pytest.raises(ValueError, match=r"allowed.*observation"):
        PromptTemplates(turn="{" + field + "}")


def test_malformed_template_is_refused() -> None:
    with pytest.raises(ValueError, match="malformed"):
        PromptTemplates(turn="{observation")


def test_attribute_access_in_a_template_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown field"):
        PromptTemplates(turn="{observation.__class__}")
