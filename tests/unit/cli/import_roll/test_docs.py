"""docs/from-roll.md says what the code does: its tables are compared with what conversions are seen to do."""

from __future__ import annotations

import importlib.util
import re
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from roll_files import FILES, converted, general

from rollwire.cli.import_roll.convert import convert
from rollwire.cli.import_roll.rules import RULES
from rollwire.serving.config import RunConfig

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "from-roll.md"
PG_WORKER = "roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker"
FURTHER: list[dict[str, Any]] = [
    {"tracker_kwargs": {}},
    {"eval_steps": 0},
    {"adv_estimator": "gae", "critic": {"model_args": {"model_name_or_path": "/models/critic"}}},
    {"actor_train.worker_cls": PG_WORKER, "actor_train.pg_variant": "cispo"},
    {"actor_infer.generating_args.top_p": 0.9, "actor_infer.generating_args.top_k": 20},
    {
        "custom_envs.FrozenLake": {
            "env_type": "game:Sudoku-v0",
            "max_steps": 9,
            "env_config": {"max_steps": 5, "scale": 4},
        }
    },
]
"""What the fixtures leave out."""


def _documented() -> set[tuple[str, str]]:
    section = PAGE.read_text().partition("\n## Keys\n")[2].partition("### Keys without a counterpart")[0]
    pairs = set()
    for line in section.splitlines():
        cells = line.strip("|").split("|")
        if line.startswith("| `") and len(cells) == 3:
            ours, rolls = re.findall(r"`([^`]+)`", cells[1]), re.findall(r"`([^`]+)`", cells[0])
            pairs |= set(product(rolls, ours))
    return pairs


def _shortened(pair: tuple[str, str]) -> tuple[str, str]:
    """Returns a pair as the page writes it."""
    key, target = general(pair[0]), general(pair[1])
    target = re.sub(r"^learner\.(critic\.)?optimizer\.", "<optimizer>.", target)
    if target.startswith("<optimizer>"):
        key = re.sub(r"^(actor_train|critic)\.", "<worker>.", key)
    return re.sub(r"^(actor_infer|(train|val)_env_manager)\.generating_args", "<sampling>", key), target


def test_the_tables_of_keys_are_what_conversions_do(tmp_path: Path) -> None:
    seen = set()
    for conversion in [convert(path) for path in FILES] + [converted(tmp_path, changes) for changes in FURTHER]:
        seen |= {_shortened(pair) for pair in conversion.conversion.pairs}
    documented = _documented()
    assert len(documented) > 100
    assert seen - documented == set(), "not on the page"
    assert documented - seen == set(), "on the page, but nothing does it"


def test_every_key_of_rollwire_on_the_page_exists() -> None:
    def exists(key: str) -> bool:
        model: Any = RunConfig.model_json_schema()
        definitions = model["$defs"]
        for part in key.replace("[]", "").replace("<optimizer>", "learner.optimizer").split("."):
            options = [model, *model.get("allOf", []), *model.get("anyOf", []), model.get("items", {})]
            for option in options:
                option = definitions[option["$ref"].rpartition("/")[2]] if "$ref" in option else option
                if part == "<Tag>" and "additionalProperties" in option:
                    model = option["additionalProperties"]
                    break
                if part in option.get("properties", {}):
                    model = option["properties"][part]
                    break
            else:
                return part in ("size", "p") or "options" in key  # free names
            model = definitions[model["$ref"].rpartition("/")[2]] if "$ref" in model else model
        return True

    missing = [target for _, target in _documented() if not exists(target)]
    assert missing == []


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("roll_docs", ROOT / "tools" / "roll_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_keys_without_a_counterpart_is_up_to_date(tool: ModuleType) -> None:
    page = PAGE.read_text()
    assert page == tool.render(page), "run: python tools/roll_docs.py"
    assert page.count("| dead |") > 10


def test_no_rule_is_hidden_by_an_earlier_one() -> None:
    for position, rule in enumerate(RULES):
        example = rule.pattern.replace("*", "x")
        hiding = [earlier.pattern for earlier in RULES[:position] if fnmatchcase(example, earlier.pattern)]
        assert hiding == [], f"{rule.pattern} never applies"


def _scalars(page: str) -> set[str]:
    """Returns the scalars that a page of the documentation defines, its braces expanded."""
    found = set()
    for line in (ROOT / "docs" / page).read_text().splitlines():
        names = re.findall(r"`([a-z_]+/[^` ]+)`", line.split("|")[1]) if line.startswith("| `") else []
        for name in names:
            parts = [part.strip("{}").split(",") for part in re.split(r"(\{[^}]*\})", name)]
            found |= {"".join(choice) for choice in product(*parts)}
    return found


def test_metrics_that_are_called_the_same_are_so_in_the_reference_of_metrics() -> None:
    defined = _scalars("metrics.md") | _scalars("algorithms.md")
    section = PAGE.read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
    same = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 and cells[1].startswith("the same"):
            same += re.findall(r"`([^`]+)`", cells[0])
    assert len(same) > 40
    assert [name for name in same if not any(fnmatchcase(scalar, name) for scalar in defined)] == []
