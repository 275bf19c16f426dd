"""The registry: what a server's configuration may define, and the one line a user gets when it cannot be used."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollwire.environment.answers import ANSWER_PATTERN, THINK_PATTERN
from rollwire.environment.registry import load_registry
from rollwire.serving.config.sections import EnvironmentSection
from rollwire.serving.server import ServeError

MODULE = '''
class Game:
    max_turns = 3
    def __init__(self, level: int = 1, *, path: str = "x"):
        if level > 5:
            raise OSError("no such level")
    def reset(self, seed): return "", {}
    def step(self, action): return "", 0.0, True, False, {}

class NoReset:
    max_turns = 3
    def step(self, action): ...

class NoTurns:
    def reset(self, seed): ...
    def step(self, action): ...

class ZeroTurns(Game):
    max_turns = 0

class BadModes(Game):
    metrics_agg_mode = {"m": "median"}

class Needs(Game):
    def __init__(self, path: str): ...

def make(level: int = 2) -> Game:
    """Makes a game.

    Details.
    """
    return Game(level)

number = 3
'''


@pytest.fixture(autouse=True)
def games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "games_of_a_user.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken_games.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("games_of_a_user", None)


def section(tag: str = "Mine", type_name: str = "games_of_a_user:Game", **options: Any) -> EnvironmentSection:
    return EnvironmentSection.model_validate({"definitions": {tag: {"type": type_name, "options": options}}})


def test_built_in_tags_need_no_configuration() -> None:
    registry = load_registry(EnvironmentSection())
    assert list(registry.environments) == [
        "FrozenLake",
        "FrozenLakeThink",
        "LargerSokoban",
        "SimpleSokoban",
        "Sokoban",
        "SokobanDifferentGridVocab",
    ]
    assert all(item.built_in for item in registry.environments.values())


def test_a_definition_adds_a_tag() -> None:
    registry = load_registry(section(level=4))
    found = registry.environments["Mine"]
    assert (found.built_in, found.options, found.step_timeout_s) == (False, {"level": 4}, 60.0)
    assert found.description.default_options["level"] == 4


@pytest.mark.parametrize(
    ("type_name", "options", "in_process"),
    [
        ("FrozenLake", {}, False),
        ("FrozenLakeThink", {}, False),
        ("FrozenLake", {"action_pattern": THINK_PATTERN}, False),
        ("Sokoban", {"action_pattern": r"move:(\w+)"}, True),
        ("openenv", {"url": "http://127.0.0.1:1", "max_turns": 2}, False),
        ("openenv", {"url": "http://127.0.0.1:1", "max_turns": 2, "action_pattern": ANSWER_PATTERN}, False),
        ("openenv", {"url": "http://127.0.0.1:1", "max_turns": 2, "action_pattern": "(a+)+$"}, True),
    ],
)
def test_patterns_that_may_backtrack_are_read_in_processes(
    type_name: str, options: dict[str, Any], in_process: bool
) -> None:
    registry = load_registry(section(type_name=type_name, **options))
    registry.close()
    assert list(registry.isolations) == (["Mine"] if in_process else [])


def test_a_function_can_make_environments() -> None:
    found = load_registry(section(type_name="games_of_a_user:make")).environments["Mine"]
    assert found.description.summary == "Makes a game."


@pytest.mark.parametrize(
    ("definition", "says"),
    [
        ({"tag": "a/b"}, "environment.definitions holds the tag 'a/b'; allowed: 1 to 63 letters, digits"),
        ({"tag": ".."}, "environment.definitions holds the tag '..'"),
        ({"type_name": "Frozen"}, "environment.definitions.Mine.type is 'Frozen'; allowed: a built-in environment"),
        ({"type_name": "no_such_module:Game"}, "cannot be imported: ModuleNotFoundError: No module named"),
        ({"type_name": "broken_games:Game"}, "cannot be imported: ZeroDivisionError: division by zero"),
        ({"type_name": "games_of_a_user:Gane"}, "has no 'Gane'; did you mean Game?"),
        ({"type_name": "games_of_a_user:number"}, "which is no class; allowed: a class with reset and step"),
        ({"type_name": ":Game"}, "module '' cannot be imported"),
        ({"type_name": "games_of_a_user:NoReset"}, "it has no method reset; see docs/environments.md"),
        ({"type_name": "games_of_a_user:NoTurns"}, "it has no attribute max_turns; see docs/environments.md"),
        ({"type_name": "games_of_a_user:ZeroTurns"}, "max_turns is 0; allowed: an integer from 1"),
        ({"type_name": "games_of_a_user:BadModes"}, "metrics_agg_mode holds 'median' for 'm'; allowed: mean, sum"),
        ({"type_name": "games_of_a_user:Needs"}, "options.path is None; allowed: a value; the constructor requires it"),
        (
            {"lewel": 3},
            "environment.definitions.Mine.options.lewel is 3; allowed: only the options level, path; "
            "did you mean level?",
        ),
        ({"level": "high"}, "environment.definitions.Mine.options.level is 'high'; allowed: a valid integer"),
        ({"level": 9}, "cannot be constructed: OSError: no such level; its options were {'level': 9}"),
    ],
)
def test_a_definition_that_cannot_be_used_stops_the_server_with_one_line(definition: dict[str, Any], says: str) -> None:
    with pytest.raises(ServeError) as caught:
        load_registry(section(**definition))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_entry_point_that_cannot_be_loaded(tmp_path: Path) -> None:
    info = tmp_path / "someones_games-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-games\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rollwire.environments]\nbroken = broken_games:Game\n")
    with pytest.raises(ServeError, match="entry point broken cannot be loaded: ZeroDivisionError: division by zero"):
        load_registry(section(type_name="broken"))
    with pytest.raises(ServeError, match="tools, broken"):
        load_registry(section(type_name="borken"))
