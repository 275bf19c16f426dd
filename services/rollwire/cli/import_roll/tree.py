"""A ROLL file as leaves: every key with its value after interpolation, or with why there is none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollwire.cli.import_roll.account import Path

_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")


@dataclass(frozen=True)
class Leaf:
    """One key that holds no further keys.

    Attributes:
        value: A scalar, a list of scalars, an empty mapping, or None.
        own: Whether it is written in the file itself, or reached from there through `${…}`; else it was included.
        problem: Why its interpolation has no value; None if it has one.
    """

    value: Any
    own: bool
    problem: str | None = None


class RollTree:
    """Leaves by path. A list of mappings counts as a mapping with the indices as keys.

    Args:
        composed: The file merged over what it includes.
        written: The file itself.
        included: The contents that it includes.
    """

    def __init__(self, composed: DictConfig, written: DictConfig, included: list[DictConfig]) -> None:
        own_keys = _written_keys([written])
        self._written = own_keys | _written_keys(included)
        self.leaves: dict[Path, Leaf] = {}
        for path, value, problem in _leaves(composed, ()):
            self.leaves[path] = Leaf(value, _prefix_in(own_keys, path) is not None, problem)
        self._referenced = _references([written, *included])

    def below(self, path: Path) -> list[Path]:
        """Returns the leaves at or below a path."""
        return [leaf for leaf in self.leaves if leaf[: len(path)] == path]

    def children(self, path: Path) -> list[str]:
        """Returns the names of the keys right below a path, in order."""
        return list(dict.fromkeys(leaf[len(path)] for leaf in self.below(path) if len(leaf) > len(path)))

    def own(self) -> list[Path]:
        """Returns the leaves of the file itself."""
        return [path for path, leaf in self.leaves.items() if leaf.own]

    def is_referenced(self, path: Path) -> bool:
        """True if some `${…}` names this leaf or a mapping that holds it."""
        return _prefix_in(self._referenced, path) is not None

    def written_key(self, path: Path) -> Path:
        """Returns the key as it is written: that of the `${…}` through which a leaf was reached, or the leaf itself."""
        return _prefix_in(self._written, path) or path


def _leaves(node: DictConfig | ListConfig, path: Path) -> Iterator[tuple[Path, Any, str | None]]:
    """Yields leaves with their values; interpolations are resolved one by one, because not all are needed."""
    keys: list[Any] = list(node.keys()) if isinstance(node, DictConfig) else list(range(len(node)))
    for key in keys:
        here = (*path, str(key))
        try:
            value = node[key]
            if isinstance(value, ListConfig) and not any(OmegaConf.is_config(item) for item in value):
                value = OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            yield here, None, str(error).splitlines()[0]
            continue
        if OmegaConf.is_config(value) and len(value):
            yield from _leaves(value, here)
        else:
            yield here, {} if OmegaConf.is_config(value) else value, None


def _raw_leaves(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields leaves of a plain container, interpolations as they are written."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _raw_leaves(value, (*path, str(key)))
    elif isinstance(node, list) and any(isinstance(item, Mapping | list) for item in node):
        for index, value in enumerate(node):
            yield from _raw_leaves(value, (*path, str(index)))
    else:
        yield path, node


def _written_keys(sources: list[DictConfig]) -> frozenset[Path]:
    raw = (_raw_leaves(OmegaConf.to_container(source, resolve=False)) for source in sources)
    return frozenset(path for leaves in raw for path, _ in leaves)


def _prefix_in(known: frozenset[Path], path: Path) -> Path | None:
    return next((path[:length] for length in range(1, len(path) + 1) if path[:length] in known), None)


def _references(sources: list[DictConfig]) -> frozenset[Path]:
    found: set[Path] = set()
    for source in sources:
        for _, value in _raw_leaves(OmegaConf.to_container(source, resolve=False)):
            texts = value if isinstance(value, list) else [value]
            for text in texts:
                if isinstance(text, str):
                    found.update(tuple(name.split(".")) for name in _REFERENCE.findall(text))
    return frozenset(found)
