"""FrozenLake against ROLL's reference values."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from rollwire.environment.frozen_lake import ACTIONS, INSTRUCTIONS, FrozenLake, FrozenLakeThink
from rollwire.environment.frozen_lake_map import generate_map, seeded_generator
from rollwire.environment.frozen_lake_tiles import TILE_PIXELS

REFERENCE_MAPS = {
    42: "FFSF/FHFF/FFFH/GHFF",
    0: "FFGS/HHFF/FHHF/HFFF",
    1: "FHFH/FGHF/FFFF/SFFF",
    43: "FFFH/FSFF/FFHG/FFFF",
    123: "FFFF/FHHS/GHFF/HFFF",
}


def answer(action: str) -> str:
    return f"<answer>{action}</answer>"


def started(seed: int = 42, **settings: Any) -> FrozenLake:
    lake = FrozenLake(**settings)
    lake.reset(seed)
    return lake


@pytest.mark.parametrize(("seed", "rows"), REFERENCE_MAPS.items())
def test_map_of_a_seed_is_roll_s(seed: int, rows: str) -> None:
    assert "/".join(generate_map(4, 0.8, seed).rows()) == rows


def test_generator_equals_gymnasium_s() -> None:
    seeding = pytest.importorskip("gymnasium.utils.seeding")
    expected, _ = seeding.np_random(7)
    assert seeded_generator(7).random(5).tolist() == expected.random(5).tolist()


def test_first_observation_and_instructions() -> None:
    observation, info = FrozenLake().reset(42)
    assert observation == "__P_\n_O__\n___O\nGO__"
    assert info == {"instructions": INSTRUCTIONS}
    assert INSTRUCTIONS.splitlines() == [
        "You are solving the FrozenLake puzzle. Forbid the whole and go to the target. You may move to the "
        "unintended direction due to the slippery ice. The answer must be one of action in a turn, format is "
        "<answer>Right</answer>",
        "The meaning of each symbol in the state is:",
        "P: player, _: empty, O: hole, G: goal, X: player in hole, √: player on goal",
        "Your available actions are:",
        "Left, Down, Right, Up",
    ]


def test_an_ordinary_move() -> None:
    observation, reward, terminated, truncated, info = started().step(answer("Left"))
    assert (observation.splitlines()[0], reward, terminated, truncated) == (
        "_P__",
        0.0,
        False,
        False,
    )
    assert info["metrics"] == {
        "action_is_effective": 1.0,
        "action_is_valid": 1.0,
        "success": 0.0,
        "format_penalty": 0.0,
    }
    assert info["metrics_agg_mode"] == {
        "action_is_effective": "mean",
        "action_is_valid": "mean",
        "success": "last",
        "format_penalty": "mean",
    }


def test_wall_bump_is_valid_but_not_effective() -> None:
    observation, reward, terminated, _, info = started().step(answer("Up"))
    assert (observation.splitlines()[0], reward, terminated) == ("__P_", 0.0, False)
    assert (info["metrics"]["action_is_valid"], info["metrics"]["action_is_effective"]) == (
        1.0,
        0.0,
    )


def test_hole_ends_without_reward() -> None:
    lake = started()
    lake.step(answer("Left"))
    observation, reward, terminated, truncated, info = lake.step(answer("Down"))
    assert (observation.splitlines()[1], reward, terminated, truncated) == (
        "_X__",
        0.0,
        True,
        False,
    )
    assert info["metrics"]["success"] == 0.0


def test_goal_pays_one() -> None:
    lake = started()
    for action in ("Left", "Left", "Down", "Down"):
        assert lake.step(answer(action))[1] == 0.0
    observation, reward, terminated, truncated, info = lake.step(answer("Down"))
    assert (observation.splitlines()[3], reward, terminated, truncated) == (
        "√O__",
        1.0,
        True,
        False,
    )
    assert info["metrics"]["success"] == 1.0
    with pytest.raises(RuntimeError, match="ended"):
        lake.step(answer("Up"))


@pytest.mark.parametrize(
    "response", ["", "Right", "<answer>Jump</answer>", "<answer>Left, Down</answer>", "<answer>Up"]
)
def test_invalid_response_costs_the_penalty_and_moves_nothing(response: str) -> None:
    lake = started()
    before = lake.render_text()
    observation, reward, terminated, truncated, info = lake.step(response)
    assert (observation, reward, terminated, truncated) == (before, -0.01, False, False)
    assert info["metrics"] == {
        "action_is_effective": 0.0,
        "action_is_valid": 0.0,
        "success": 0.0,
        "format_penalty": -0.01,
    }


@pytest.mark.parametrize(
    ("response", "direction"),
    [
        ("<answer>Left</answer>", 0),
        ("<answer> dOWN\n</answer>", 1),
        ("I say <answer>Right</answer> and <answer>Left</answer>", 2),
        ("<|im_start|><answer><|im_end|>Up</answer><|im_end|>", 3),
        ("<answer>\nUp\n</answer>", 3),
        ("<answer>4</answer>", None),
    ],
)
def test_parsing(response: str, direction: int | None) -> None:
    assert FrozenLake().parse_action(response) == direction


def test_think_variant_wants_a_thought_before_the_answer() -> None:
    lake = FrozenLakeThink()
    assert lake.parse_action("<think>north\nis safe</think>\n<answer>Up</answer>") == 3
    assert lake.parse_action("<answer>Up</answer>") is None


def test_turn_limit_truncates_and_an_always_invalid_player_scores_minus_a_tenth() -> None:
    lake = started()
    steps = [lake.step("no") for _ in range(lake.max_turns)]
    assert [truncated for *_, truncated, _ in steps] == [False] * 9 + [True]
    assert not any(terminated for _, _, terminated, _, _ in steps)
    assert sum(reward for _, reward, *_ in steps) == pytest.approx(-0.10)


def test_reaching_the_goal_at_the_limit_terminates_without_truncating() -> None:
    lake = started(max_steps=5)
    for action in ("Left", "Left", "Down", "Down"):
        lake.step(answer(action))
    assert lake.step(answer("Down"))[2:4] == (True, False)


def test_random_legal_play_succeeds_as_often_as_roll_s() -> None:
    # 0.218 was measured on 100,000 games. One game on each of 4,000 maps has a standard error of 0.0065.
    choices = np.random.default_rng(0).integers(0, 4, (4000, 10))
    outcomes = [_succeeds(seed, choices[seed]) for seed in range(4000)]
    assert np.mean(outcomes) == pytest.approx(0.218, abs=0.02)


def _succeeds(seed: int, directions: Any) -> bool:
    lake = started(seed)
    for direction in directions:
        _, reward, terminated, _, _ = lake.step(answer(ACTIONS[direction]))
        if terminated:
            return bool(reward > 0)
    return False


def test_slippery_ice_goes_each_way_a_third_of_the_time() -> None:
    # Seed 43 starts on an inner cell with four frozen neighbours. Moving up can never lead down.
    outcomes: Counter[str] = Counter()
    for draw in range(3000):
        lake = started(43, is_slippery=True)
        lake._slips = seeded_generator(draw)
        outcomes[lake.step(answer("Up"))[0]] += 1
    assert len(outcomes) == 3
    # Standard error of a count is 26.
    assert all(abs(count - 1000) < 130 for count in outcomes.values())


def test_slips_follow_gymnasium_s_stream() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    rows = generate_map(4, 0.8, 43).rows()
    reference = gymnasium.make("FrozenLake-v1", desc=rows, is_slippery=True).unwrapped
    reference.reset(seed=43)
    lake = started(43, is_slippery=True)
    for direction in (2, 1, 0, 3, 2, 1):
        cell, _, done, _, _ = reference.step(direction)
        observation, _, terminated, _, _ = lake.step(answer(ACTIONS[direction]))
        symbol = "".join(observation.split("\n")).find
        assert (max(symbol("P"), symbol("X"), symbol("√")), terminated) == (cell, done)
        if done:
            break


def test_same_seed_same_episode_and_other_sizes() -> None:
    first, second = started(5, is_slippery=True, size=8), started(5, is_slippery=True, size=8)
    assert len(first.render_text().splitlines()) == 8
    for action in ("Left", "Down", "Right", "Up"):
        replies = [lake.step(answer(action)) for lake in (first, second)]
        assert replies[0] == replies[1]
        if replies[0][2]:
            break


def test_picture_shows_the_move() -> None:
    lake = started()
    before = lake.render_rgb()
    assert before.shape == (4 * TILE_PIXELS, 4 * TILE_PIXELS, 3)
    assert before.dtype == np.uint8
    lake.step(answer("Left"))
    changed = (before != lake.render_rgb()).any(axis=2)
    assert changed[:TILE_PIXELS, TILE_PIXELS : 3 * TILE_PIXELS].any()
    assert not changed[TILE_PIXELS:].any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 1}, "size is 1"),
        ({"p": 0.0}, r"p is 0\.0"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"action_pattern": "("}, "regular expression"),
        ({"action_pattern": "answer"}, "no group"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FrozenLake(**settings)


def test_a_step_needs_an_episode() -> None:
    with pytest.raises(RuntimeError, match="reset"):
        FrozenLake().step(answer("Up"))
