"""No key of a ROLL file is dropped without a word."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from roll_files import FILES, QUICK_START, converted, told

from rollwire.cli.import_roll.account import Account, Fate, dotted
from rollwire.cli.import_roll.compose import read_roll_file
from rollwire.cli.import_roll.convert import convert
from rollwire.serving.config import load_config

STEMS = [path.stem for path in FILES]


def _mappings(content: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Returns the path of every mapping in a YAML file."""
    if not isinstance(content, dict):
        return []
    inner = [found for key, value in content.items() for found in _mappings(value, (*path, str(key)))]
    return [path, *inner]


@pytest.mark.parametrize("path", FILES, ids=STEMS)
def test_every_key_has_a_fate_and_all_but_the_mapped_are_told(path: Path) -> None:
    result = convert(path)
    tree, account = result.conversion.tree, result.conversion.account
    assert tree.own()
    for leaf in tree.own():
        entry = account.entry(leaf)  # raises KeyError for a key that was dropped
        shown = [key for key in (dotted(leaf), dotted(tree.written_key(leaf))) if told(result, key)]
        assert bool(shown) == (entry.fate is not Fate.MAPPED), dotted(leaf)
        if shown:
            assert entry.why in told(result, shown[0])


@pytest.mark.parametrize("path", FILES, ids=STEMS)
def test_every_key_as_it_is_written_leads_to_keys_with_a_fate(path: Path) -> None:
    """Independent of how leaves are found: from the plain YAML, no key is without a leaf below it or above it."""
    conversion = convert(path).conversion

    def walk(value: object, key: tuple[str, ...]) -> None:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                walk(inner, (*key, str(name)))
        else:
            below = [leaf for leaf in conversion.account if leaf[: len(key)] == key]
            assert below, dotted(key)

    sources = [path] if path == QUICK_START else [path, path.with_name("frozen_lake.yaml")]
    for source in sources:
        for name, value in yaml.safe_load(source.read_text()).items():
            walk(value, (str(name),))


@pytest.mark.parametrize("where", _mappings(yaml.safe_load(QUICK_START.read_text())), ids=dotted)
def test_an_unknown_key_is_named_wherever_it_stands(tmp_path: Path, where: tuple[str, ...]) -> None:
    key = dotted((*where, "surprise"))
    result = converted(tmp_path, {key: 1})
    assert told(result, key) != "", result.report


def test_a_key_that_takes_effect_elsewhere_is_kept_track_of_once() -> None:
    account = Account()
    account.mark([("a",)], Fate.MAPPED)
    account.mark([("a",)], Fate.CHANGED, "one")
    account.mark([("a",)], Fate.CHANGED, "two")
    account.mark([("a",)], Fate.MAPPED)
    assert account.entry(("a",)).why == "one; two"
    with pytest.raises(AssertionError):
        account.mark([("b",)], Fate.DEAD)


@pytest.mark.parametrize("path", FILES, ids=STEMS)
def test_what_comes_out_is_a_configuration_with_an_origin_for_every_value(path: Path, tmp_path: Path) -> None:
    result = convert(path)
    written = tmp_path / "rollwire.yaml"
    written.write_text(result.yaml)

    assert yaml.safe_load(result.yaml) == result.conversion.settings.plain()
    config = load_config(written)
    assert config.run.name and config.environments[0].tag == "FrozenLake"
    values = [line for line in result.yaml.splitlines() if line.strip() and not line.startswith("#")]
    for line in values:
        holds_more = line.endswith(":") or line.strip().startswith(("- ", "level", "weight", "min_ratio", "max_ratio"))
        assert holds_more or "  # " in line, line


def test_leaves_of_the_file_are_told_from_those_it_includes() -> None:
    tree = read_roll_file(QUICK_START).tree
    own = {dotted(path) for path in tree.own()}
    assert "custom_envs.FrozenLake.env_config.is_slippery" in own, "reached through ${custom_env.FrozenLake}"
    assert "custom_env.FrozenLake.env_type" not in own
    assert tree.written_key(("custom_envs", "FrozenLake", "env_type")) == ("custom_envs", "FrozenLake")
