"""The configuration that a conversion builds up, and its YAML with a comment on where each value comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import yaml

from rollwire.cli.import_roll.account import Path
from rollwire.serving.config import RunConfig

_INDENT: Final = "  "
_MAX_SOURCES: Final = 4
_ENDLESS: Final = 1 << 30


class Settings:
    """Values by path, in the order of Rollwire's schema."""

    def __init__(self) -> None:
        self._values: dict[Path, tuple[Any, Sequence[str]]] = {}

    def put(self, path: Path, value: Any, sources: Sequence[str]) -> None:
        """Sets a value.

        Args:
            path: Key.
            value: What YAML can hold.
            sources: Keys of ROLL that it comes from; empty for a default of ROLL.
        """
        self._values[path] = (value, sources)

    def get(self, path: Path) -> Any:
        """Returns a value that was set before; None if there is none."""
        return self._values.get(path, (None, ()))[0]

    def plain(self) -> dict[str, Any]:
        """Returns the nested mapping."""
        nested: dict[str, Any] = {}
        for path, (value, _) in self._values.items():
            inner = nested
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = value
        return nested

    def yaml(self, head: Sequence[str]) -> str:
        """Returns the file.

        Args:
            head: Lines of comment for its top.
        """
        sections = list(RunConfig.model_fields)
        paths = sorted(self._values, key=lambda path: sections.index(path[0]))
        lines = [f"# {line}".rstrip() for line in head]
        open_section: Path = ()
        for path in self._grouped(paths):
            if path[0] != (open_section[0] if open_section else None):
                lines.append("")
            shared = _shared(open_section, path[:-1])
            for depth in range(shared, len(path) - 1):
                lines.append(f"{_INDENT * depth}{_scalar(path[depth])}:")
            open_section = path[:-1]
            lines.extend(self._lines(path))
        return "\n".join(lines) + "\n"

    def _grouped(self, paths: Sequence[Path]) -> list[Path]:
        """Returns the paths with those of one section together, plain keys before nested sections."""
        first: dict[Path, int] = {}
        for position, path in enumerate(paths):
            for length in range(1, len(path)):
                first.setdefault(path[:length], position)

        def place(path: Path) -> list[tuple[int, int]]:
            inner = [(int(length > 1), first[path[:length]]) for length in range(1, len(path))]
            return [*inner, (0, paths.index(path))]

        return sorted(paths, key=place)

    def _lines(self, path: Path) -> Iterator[str]:
        value, sources = self._values[path]
        indent = _INDENT * (len(path) - 1)
        shown = ", ".join(sources[:_MAX_SOURCES]) + (", …" if len(sources) > _MAX_SOURCES else "")
        comment = f"  # {shown or 'default of ROLL'}"
        if isinstance(value, list | dict) and value:
            yield f"{indent}{_scalar(path[-1])}:{comment}"
            block = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=_ENDLESS)
            yield from (f"{indent}{_INDENT}{line}" for line in block.splitlines())
        else:
            yield f"{indent}{_scalar(path[-1])}: {_scalar(value)}{comment}"


def _shared(first: Path, second: Path) -> int:
    """Returns how many leading parts two paths share."""
    for length, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return length
    return min(len(first), len(second))


def _scalar(value: Any) -> str:
    """Returns a value on one line."""
    if isinstance(value, str) and "\n" in value:
        return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=_ENDLESS).strip()
    return (
        yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=_ENDLESS)
        .removesuffix("\n")
        .removesuffix("\n...")
    )
