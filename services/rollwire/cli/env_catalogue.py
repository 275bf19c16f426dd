"""Tables of environments and of types of environments, for the terminal."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence

from google.protobuf.json_format import MessageToDict
from rich.table import Table
from rich.text import Text

from rollwire.v1 import environment_pb2 as pb

_SHOWN_CHARACTERS = 24


def catalogue(environments: Sequence[pb.EnvironmentDescription]) -> Table:
    """Returns a table of environments that can be opened."""
    table = Table(box=None, padding=(0, 2, 1, 0), header_style="bold")
    for heading in ("environment", "turns", "options and defaults", "draws"):
        table.add_column(heading, justify="right" if heading == "turns" else "left")
    for item in environments:
        formats = [pb.RenderFormat.Name(shape).removeprefix("RENDER_FORMAT_").lower() for shape in item.render_formats]
        options = _options({name: _short(value) for name, value in MessageToDict(item.default_options).items()})
        table.add_row(_named(item.tag, item.summary), str(item.max_turns), options, ", ".join(formats))
    return table


def types() -> Table:
    """Returns a table of the types that a configuration can define environments of."""
    from rollwire.environment.options import OptionSchema
    from rollwire.environment.types import ADAPTERS, resolve

    table = Table(box=None, padding=(0, 2, 1, 0), header_style="bold")
    table.add_column("type, for environment.definitions")
    table.add_column("options and defaults")
    for name in ADAPTERS:
        factory = resolve(name)
        schema = OptionSchema(factory)
        shown = {option: _short(value) for option, value in schema.defaults({}).items()}
        summary = (inspect.getdoc(factory) or "").partition("\n")[0]
        table.add_row(_named(name, summary), _options({**dict.fromkeys(schema.required, "(required)"), **shown}))
    return table


def _named(name: str, summary: str) -> Text:
    return Text(name, style="bold green").append(f"\n{summary}", style="not bold default")


def _options(values: dict[str, str]) -> Text:
    options = Text()
    for name, value in sorted(values.items()):
        options.append(name, style="cyan").append(f" {value}\n", style="dim")
    options.rstrip()
    return options


def _short(value: object) -> str:
    text = json.dumps(_integral(value), ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def _integral(value: object) -> object:
    """Turns 4.0 into 4: protobuf's Struct has only floating-point numbers."""
    if isinstance(value, list):
        return [_integral(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
