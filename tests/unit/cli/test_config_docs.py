from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("config_docs", ROOT / "tools" / "config_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date(tool: ModuleType) -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == tool.render(), "run: python tools/config_docs.py"


def test_every_key_says_what_it_means(tool: ModuleType) -> None:
    rows = [line for line in tool.render().splitlines() if line.startswith("| `") and "{" not in line[:4]]
    assert len(rows) > 60
    for row in rows:
        key, allowed, default, meaning = (cell.strip() for cell in row.strip("|").split(" | "))
        assert key and allowed and default and len(meaning) > 10, row


def test_the_fields_of_turn_templates_are_those_of_the_rollout_server(tool: ModuleType) -> None:
    from rollwire.rollout.prompts import TURN_FIELDS

    documented = {line.split("`")[1].strip("{}") for line in tool.render().splitlines() if line.startswith("| `{")}
    assert documented == TURN_FIELDS
