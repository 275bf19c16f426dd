"""Sokoban: ROLL's rules and rewards, rooms that can be solved."""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any

import numpy as np
import pytest

from rollwire.environment.sokoban import (
    ACTIONS,
    INSTRUCTIONS,
    LargerSokoban,
    SimpleSokoban,
    Sokoban,
    SokobanDifferentGridVocab,
)
from rollwire.environment.sokoban_room import MOVES, Cell, Room, generate_room, most_boxes
from rollwire.environment.tiles import TILE_PIXELS


def answer(action: str) -> str:
    return f"<answer>{action}</answer>"


def solution(room: Room) -> list[str]:
    """A shortest solution, found forwards and breadth first: it shares nothing with the generator but the room."""
    start = (room.player, room.boxes)
    came_from: dict[Any, Any] = {start: None}
    frontier = deque([start])
    while frontier:
        state = frontier.popleft()
        if state[1] == room.targets:
            path: list[str] = []
            while came_from[state] is not None:
                state, action = came_from[state]
                path.append(action)
            return path[::-1]
        for action, (down, right) in zip(ACTIONS, MOVES, strict=True):
            following = _after(room, *state, down, right)
            if following is not None and following not in came_from:
                came_from[following] = (state, action)
                frontier.append(following)
    raise AssertionError(f"no solution: {room}")


def _after(room: Room, player: Cell, boxes: frozenset[Cell], down: int, right: int) -> Any:
    there = (player[0] + down, player[1] + right)
    beyond = (there[0] + down, there[1] + right)
    if there not in room.floor:
        return None
    if there not in boxes:
        return there, boxes
    if beyond not in room.floor or beyond in boxes:
        return None
    return there, boxes - {there} | {beyond}


def game_in(*rows: str, **settings: Any) -> Sokoban:
    """A game in a room that is drawn with the default symbols."""
    game = Sokoban(**settings)
    game.reset(0)
    cells = {(r, c): symbol for r, row in enumerate(rows) for c, symbol in enumerate(row)}
    game._room = Room(
        len(rows),
        len(rows[0]),
        frozenset(cell for cell, symbol in cells.items() if symbol != "#"),
        frozenset(cell for cell, symbol in cells.items() if symbol in "O√S"),
        frozenset(),
        (0, 0),
        1,
    )
    game._boxes = {cell for cell, symbol in cells.items() if symbol in "X√"}
    (game._player,) = (cell for cell, symbol in cells.items() if symbol in "PS")
    return game


@pytest.mark.parametrize("game", [SimpleSokoban, LargerSokoban, SokobanDifferentGridVocab])
def test_every_room_can_be_solved_within_the_turn_limit(game: type[Sokoban]) -> None:
    for seed in range(200):
        played = game()
        played.reset(seed)
        assert played._room is not None
        path = solution(played._room)
        assert 1 <= len(path) <= played.max_turns
        replies = [played.step(answer(action)) for action in path]
        assert [reply[2] for reply in replies] == [False] * (len(path) - 1) + [True]
        assert replies[-1][4]["metrics"]["success"] == 1.0
        assert sum(reply[1] for reply in replies) == pytest.approx(
            10 - 0.1 * len(path) + len(played._room.targets), abs=3
        )


@pytest.mark.parametrize(
    "settings",
    [(5, 5, 1, 1), (5, 5, 1, 300), (6, 6, most_boxes(6, 6), 300), (10, 10, 2, 10), (12, 7, 3, 20), (24, 24, 1, 30)],
)
def test_rooms_of_any_size_are_solvable_in_the_depth_asked_for(settings: tuple[int, int, int, int]) -> None:
    for seed in (0, 1, 2, 2**64 - 1):
        room = generate_room(*settings, seed)
        assert len(room.boxes) == len(room.targets) == settings[2]
        assert room.boxes != room.targets and room.player in room.floor - room.boxes
        assert room.boxes | room.targets <= room.floor
        if settings[2] < 3:  # the solver of this test takes long for more
            assert len(solution(room)) == room.moves <= settings[3]


def test_the_outer_wall_is_closed() -> None:
    for seed in range(50):
        rows = LargerSokoban().reset(seed)[0].splitlines()
        assert rows[0] == rows[-1] == "#" * 10
        assert all(row[0] == row[-1] == "#" for row in rows)


def test_the_same_seed_gives_the_same_room_and_others_give_others() -> None:
    rooms = [SimpleSokoban().reset(seed)[0] for seed in range(100)]
    generate_room.cache_clear()
    assert rooms == [SimpleSokoban().reset(seed)[0] for seed in range(100)]
    assert len(set(rooms)) > 90


def test_reference_rooms_do_not_change() -> None:
    """Recorded runs must be playable again: a room belongs to its seed for good."""
    rooms = "".join(game().reset(seed)[0] for game in (SimpleSokoban, LargerSokoban) for seed in range(20))
    assert zlib.crc32(rooms.encode()) == 2847086361


def test_first_observation_and_instructions() -> None:
    observation, info = SimpleSokoban().reset(3)
    assert set("".join(observation.split())) <= set("#_O√XPS")
    assert info["instructions"] == (
        f"{INSTRUCTIONS}\nThe meaning of each symbol in the state is:\n#: wall, _: empty, O: target, √: box on target, "
        "X: box, P: player, S: player on target\nYour available actions are:\nUp, Down, Left, Right"
    )
    assert info.keys() == {"instructions"}


def test_other_symbols_draw_the_same_room() -> None:
    plain = SimpleSokoban(search_depth=30).reset(7)[0]
    letters, info = SokobanDifferentGridVocab().reset(7)
    assert letters == plain.translate(str.maketrans("#_O√XPS", "W.GCBA@"))
    assert (
        "W: wall, .: empty, G: target, C: box on target, B: box, A: player, @: player on target" in info["instructions"]
    )


def test_rewards_are_those_of_gym_sokoban() -> None:
    game = game_in("######", "#PXO_#", "#_XO_#", "#____#", "######", max_steps=20)
    observation, reward, terminated, _, info = game.step(answer("Right"))
    assert (observation.splitlines()[1], reward, terminated) == ("#_P√_#", pytest.approx(0.9), False)
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
    observation, reward, *_ = game.step(answer("Right"))
    assert (observation.splitlines()[1], reward) == ("#__SX#", pytest.approx(-1.1))
    observation, reward, *_, info = game.step(answer("right"))
    assert (observation.splitlines()[1], reward) == ("#__SX#", pytest.approx(-0.1)), "a box before a wall stays"
    assert info["metrics"]["action_is_effective"] == 0.0


def test_the_last_box_pays_ten_more_and_ends_the_episode() -> None:
    game = game_in("######", "#PXO_#", "######")
    _, reward, terminated, truncated, info = game.step(answer("Right"))
    assert (reward, terminated, truncated) == (pytest.approx(10.9), True, False)
    assert info["metrics"]["success"] == 1.0
    with pytest.raises(RuntimeError, match="ended"):
        game.step(answer("Up"))


def test_a_box_does_not_push_a_box() -> None:
    game = game_in("#######", "#PXX_O#", "#O____#", "#######")
    observation, reward, *_ = game.step(answer("Right"))
    assert (observation.splitlines()[1], reward) == ("#PXX_O#", pytest.approx(-0.1))


@pytest.mark.parametrize(
    "response", ["", "Right", "<answer>Jump</answer>", "<answer>1</answer>", "<answer>Up" * 50_000]
)
def test_an_invalid_response_costs_the_penalty_alone_and_moves_nothing(response: str) -> None:
    game = SimpleSokoban()
    before, _ = game.reset(1)
    observation, reward, terminated, truncated, info = game.step(response)
    assert (observation, reward, terminated, truncated) == (before, -0.15, False, False)
    assert info["metrics"]["format_penalty"] == -0.15
    assert info["metrics"]["action_is_valid"] == info["metrics"]["action_is_effective"] == 0.0


def test_the_turn_limit_truncates() -> None:
    game = SimpleSokoban(max_steps=3)
    game.reset(1)
    assert [game.step("?")[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]


def test_the_picture_shows_the_move() -> None:
    game = game_in("######", "#PXO_#", "######")
    before = game.render_rgb()
    assert before.shape == (3 * TILE_PIXELS, 6 * TILE_PIXELS, 3) and before.dtype == np.uint8
    game.step(answer("Right"))
    changed = (before != game.render_rgb()).any(axis=2)
    assert all(changed[TILE_PIXELS : 2 * TILE_PIXELS, c * TILE_PIXELS : (c + 1) * TILE_PIXELS].any() for c in (1, 2, 3))
    assert not changed[:TILE_PIXELS].any() and not changed[:, 4 * TILE_PIXELS :].any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim_room": (4, 6)}, r"dim_room is \[4, 6\]; allowed: rows and columns from 5 to 24"),
        ({"dim_room": (6, 25)}, "dim_room"),
        ({"num_boxes": 0}, "num_boxes is 0; allowed: 1 to"),
        ({"num_boxes": 20}, "num_boxes is 20"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"search_depth": 0}, "search_depth 0"),
        ({"symbols": "#_O"}, "symbols is '#_O'; allowed: seven different characters"),
        ({"symbols": "##O√XPS"}, "symbols"),
        ({"action_pattern": "("}, "regular expression"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimpleSokoban(**settings)


def test_a_step_needs_an_episode() -> None:
    with pytest.raises(RuntimeError, match="reset"):
        Sokoban().step(answer("Up"))
