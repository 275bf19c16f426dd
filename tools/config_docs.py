"""Writes docs/configuration.md from the models: `python tools/config_docs.py`. A test keeps the two equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollwire.serving.config import RunConfig
from rollwire.serving.config.sections import MAX_COUNT

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

_HEAD = f"""# Configuration

One YAML file describes a run: `rollwire launch CONFIG` and `rollwire train CONFIG` read it, and every server reads its
sections of it. A key that is not listed here is an error that names the nearest key. Every key has a default; the file
needs only what differs.

- Override keys on the command line: `rollwire launch CONFIG run.max_steps=10 'services.rollout=[10.0.0.2:50051]'`.
  Values are YAML. An entry of a list that the file holds is named by its number: `environments.0.weight=2`.
- Integers are at most {MAX_COUNT:,} where nothing less is stated, and numbers finite.
- Refer to other keys with `${{...}}`, such as `log_dir: ${{run.output_dir}}/curves`.
- `rollwire config show CONFIG [KEY=VALUE]...` prints what it resolves to, `--dry-run` also the batch arithmetic, and
  `rollwire config schema` a JSON Schema for editors.

This page is generated from `services/rollwire/serving/config` by `python tools/config_docs.py`.
"""

_TAIL = """
## Turn templates

`rollout.turn_template` is a Python format string. It may use these fields; a literal brace is doubled.

| Field | Text |
|---|---|
| `{turn_idx}` | Number of the turn, from 1 |
| `{observation}` | What the environment shows |
| `{actions_left}` | Turns left, this one included |
| `{max_response_length}` | `rollout.max_new_tokens_per_turn` |
| `{suffix}` | What the environment adds to the observation; usually empty |
"""


def render() -> str:
    """Returns the page."""
    schema = RunConfig.model_json_schema()
    definitions = schema["$defs"]
    top: list[str] = []
    sections: list[str] = []
    for name, field in schema["properties"].items():
        _add(name, field, definitions, top, sections)
    return f"{_HEAD}\n## Top level\n\n{_table(top)}{''.join(sections)}{_TAIL}"


def _add(path: str, field: dict[str, Any], definitions: dict[str, Any], rows: list[str], sections: list[str]) -> None:
    """Adds a key to the rows of its section; a key that holds a section gets one of its own."""
    inner, shape = _section_of(field)
    if inner is None:
        rows.append(_row(path, field))
        return
    section = definitions[inner]
    if shape:
        rows.append(_row(path, field))
        path = f"{path}{shape}"
    own: list[str] = []
    deeper: list[str] = []
    for name, member in section["properties"].items():
        _add(f"{path}.{name}", member, definitions, own, deeper)
    description = field.get("description") or section["description"]
    sections.append(f"\n## `{path}`\n\n{description}\n\n{_table(own) if own else ''}")
    sections.extend(deeper)


def _section_of(field: dict[str, Any]) -> tuple[str | None, str]:
    """Returns the name of the section inside a field, and how it is reached: `[]` in a list, `.<name>` in a mapping."""
    for holder, shape in ((field, ""), (field.get("items"), "[]"), (field.get("additionalProperties"), ".<name>")):
        if isinstance(holder, dict) and "$ref" in holder:
            return holder["$ref"].rpartition("/")[2], shape
    return None, ""


def _table(rows: list[str]) -> str:
    return "| Key | Allowed | Default | Meaning |\n|---|---|---|---|\n" + "".join(rows)


def _row(path: str, field: dict[str, Any]) -> str:
    default = f"`{json.dumps(field['default'], ensure_ascii=False)}`" if "default" in field else "required"
    return f"| `{path}` | {_allowed(field)} | {default} | {' '.join(field.get('description', '').split())} |\n"


def _allowed(field: dict[str, Any]) -> str:
    """Says in a few words which values a field takes."""
    if "anyOf" in field:
        return " or ".join(_allowed(option) for option in field["anyOf"])
    if "$ref" in field:
        return "section"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    kind = {
        "integer": "integer",
        "number": "number",
        "string": "text",
        "boolean": "`true`, `false`",
        "null": "`null`",
        "array": "list",
        "object": "mapping",
    }[field["type"]]
    if field["type"] == "array" and "type" in field["items"]:
        kind = f"list of {_allowed(field['items'])}"
    bounds = [
        f"{sign} {field[key]:g}" if isinstance(field[key], float) else f"{sign} {field[key]}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in field and field[key] != MAX_COUNT
    ]
    return " ".join([kind, ", ".join(bounds)]).strip()


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
