"""Options against the constructor: names, types, defaults."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pytest

from rollwire.environment.frozen_lake import FrozenLake, FrozenLakeThink
from rollwire.environment.options import OptionError, OptionSchema
from rollwire.environment.protocol import Environment

if TYPE_CHECKING:
    from fractions import Fraction


class Base:
    def __init__(self, size: int = 4, rate: float = 0.5, hard: bool = False, config_path: str = "x") -> None: ...


class Derived(Base):
    def __init__(self, words: Sequence[str] = ("a",), mode: Literal["slow", "fast"] = "slow", **rest: Any) -> None: ...


class Open:
    def __init__(self, seedless: bool = True, **anything: Any) -> None: ...


@dataclass
class FromFields:
    level: int
    name: str | None = None


class Untyped:
    def __init__(self, anything=1) -> None: ...  # type: ignore[no-untyped-def]


class Unresolvable:
    def __init__(self, part: "Fraction | None" = None) -> None: ...


class ByProtocol(Environment):
    def __init__(self, depth: int = 1) -> None: ...


class WithoutConstructor(Environment):
    pass


def function(width: int = 3) -> Base:
    raise NotImplementedError(width)


def test_options_follow_the_base_classes_through_kwargs() -> None:
    assert sorted(OptionSchema(Derived).requestable) == ["config_path", "hard", "mode", "rate", "size", "words"]
    assert OptionSchema(Open).requestable == ["seedless"]
    assert OptionSchema(FromFields).requestable == ["level", "name"]
    assert OptionSchema(function).requestable == ["width"]
    assert OptionSchema(ByProtocol).requestable == ["depth"]
    assert OptionSchema(WithoutConstructor).requestable == []


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, {}),
        ({"size": 8.0}, {"size": 8}),  # protobuf's Struct has no integers
        ({"size": 8, "rate": 1.0, "hard": True}, {"size": 8, "rate": 1.0, "hard": True}),
        ({"words": ["x", "y"], "mode": "fast"}, {"words": ["x", "y"], "mode": "fast"}),
    ],
)
def test_valid_options_are_converted(options: dict[str, Any], taken: dict[str, Any]) -> None:
    found = OptionSchema(Derived).requested(options)
    assert found == taken
    assert {name: type(value) for name, value in found.items()} == {name: type(value) for name, value in taken.items()}


@pytest.mark.parametrize(
    ("options", "name", "allowed"),
    [
        ({"sise": 4}, "sise", "did you mean size?"),
        ({"zzz": 4}, "zzz", "only the options config_path, hard, mode"),
        ({"size": "4"}, "size", "a valid integer"),
        ({"size": 4.5}, "size", "a valid integer"),
        ({"size": True}, "size", "a valid integer"),
        ({"size": None}, "size", "a valid integer"),
        ({"hard": 1.0}, "hard", "a valid boolean"),
        ({"hard": "yes"}, "hard", "a valid boolean"),
        ({"rate": "0.5"}, "rate", "a valid number"),
        ({"mode": "medium"}, "mode", "'slow' or 'fast'"),
        ({"words": ["a", 3]}, "words[1]", "a valid string"),
        ({"words": "abc"}, "words", "a valid"),
        ({"self": 1}, "self", "only the options"),
        ({"rest": {}}, "rest", "only the options"),
    ],
)
def test_invalid_options_name_the_option_and_what_is_allowed(options: dict[str, Any], name: str, allowed: str) -> None:
    with pytest.raises(OptionError) as caught:
        OptionSchema(Derived).requested(options)
    assert caught.value.name == name
    assert allowed in caught.value.allowed


def test_some_options_belong_to_the_configuration_alone() -> None:
    schema = OptionSchema(Base, ["config_path"])
    assert schema.configured({"config_path": "y"}) == {"config_path": "y"}
    assert "config_path" not in schema.defaults({})
    with pytest.raises(OptionError, match="only in the server's configuration"):
        schema.requested({"config_path": "y"})


def test_required_options_have_to_be_configured() -> None:
    schema = OptionSchema(FromFields)
    with pytest.raises(OptionError, match="option level is None; allowed: a value; the constructor requires it"):
        schema.configured({})
    assert schema.configured({"level": 3}) == {"level": 3}


def test_types_that_cannot_be_read_accept_anything() -> None:
    assert OptionSchema(Untyped).requested({"anything": [1, {"a": 2.5}]}) == {"anything": [1, {"a": 2.5}]}
    assert OptionSchema(Unresolvable).requested({"part": "1/2"}) == {"part": "1/2"}


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(OptionError, match="a value that JSON can hold"):
        OptionSchema(Untyped).configured({"anything": object()})


def test_defaults_are_the_effective_ones() -> None:
    assert OptionSchema(Derived).defaults({"size": 9, "words": ("b",)}) == {
        "words": ["b"], "mode": "slow", "size": 9, "rate": 0.5, "hard": False, "config_path": "x",
    }  # fmt: skip


def test_options_of_frozen_lake() -> None:
    for game in (FrozenLake, FrozenLakeThink):
        schema = OptionSchema(game, game.config_only_options)
        assert set(schema.requestable) == {
            "size", "p", "is_slippery", "max_steps", "format_penalty", "env_instruction",
        }  # fmt: skip
        assert schema.requested({"size": 8.0, "p": 1, "is_slippery": True}) == {
            "size": 8,
            "p": 1.0,
            "is_slippery": True,
        }
