"""Reads a ROLL file together with what its `defaults` include, as Hydra would, and refuses what is no agentic one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollwire.cli.import_roll.templates import KNOWN_CONTENTS, known_contents
from rollwire.cli.import_roll.tree import RollTree
from rollwire.serving.config import ConfigError
from rollwire.serving.config.loader import read_yaml

_DEFAULTS: Final = "defaults"
_SELF: Final = "_self_"
_HERE: Final = ("", "_here_", "_global_")
_MAX_DEPTH: Final = 8
# Without an environment manager there is nothing to play; these sections tell what it is instead.
_OTHER_PIPELINES: Final = {"rewards": "rlvr", "validation": "rlvr", "student": "distill", "sequence_packing": "sft"}


@dataclass
class RollFile:
    """A ROLL file that was read.

    Attributes:
        name: Name of the file.
        tree: Its leaves.
        assumed: Entries of `defaults` that are not on disk and whose contents Rollwire knows.
        included: Entries of `defaults` that were read.
    """

    name: str
    tree: RollTree
    assumed: list[str] = field(default_factory=list)
    included: list[str] = field(default_factory=list)


def read_roll_file(path: Path) -> RollFile:
    """Reads a configuration of ROLL's agentic pipeline.

    Raises:
        ConfigError: It is missing, no YAML, includes something unknown, or is for another pipeline.
    """
    reader = _Reader()
    written = read_yaml(path)
    try:
        composed = reader.compose(path, written, 0)
        own = _without_defaults(written)
        tree = RollTree(composed, own, reader.contents)
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{path} cannot be composed: {' '.join(str(error).split())}") from error
    _check_agentic(path, tree)
    return RollFile(path.name, tree, reader.assumed, reader.included)


class _Reader:
    """Follows `defaults`."""

    def __init__(self) -> None:
        self.contents: list[DictConfig] = []
        self.assumed: list[str] = []
        self.included: list[str] = []

    def compose(self, path: Path, written: DictConfig, depth: int) -> DictConfig:
        """Merges a file with what it includes; later entries win. The file itself comes last unless it says where."""
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{path}: `defaults` are nested more than {_MAX_DEPTH} deep; does a file include itself?")
        own = _without_defaults(written)
        entries = _entries(path, OmegaConf.to_container(written, resolve=False))
        if not any(name == _SELF for name, _ in entries):
            entries.append((_SELF, ""))
        parts = [own if name == _SELF else self._include(path, name, package, depth) for name, package in entries]
        merged = OmegaConf.merge(*parts)
        assert isinstance(merged, DictConfig)
        return merged

    def _include(self, path: Path, name: str, package: str, depth: int) -> DictConfig:
        target = path.parent / (name if name.endswith(".yaml") else f"{name}.yaml")
        if target.is_file():
            written = read_yaml(target)
            self.included.append(name)
            self.contents.append(written)
            contents = self.compose(target, written, depth + 1)
        else:
            stem = Path(name).name.removesuffix(".yaml")
            if stem not in KNOWN_CONTENTS:
                raise ConfigError(
                    f"{path}: `defaults` include {name!r}, but {target} does not exist and its contents are unknown; "
                    f"put the file there, or remove the entry (known without a file: {', '.join(KNOWN_CONTENTS)})"
                )
            self.assumed.append(name)
            contents = OmegaConf.create(known_contents(stem))
            self.contents.append(contents)
        if package not in _HERE:
            nested: Any = OmegaConf.create({})
            OmegaConf.update(nested, package, contents)
            contents = nested
        return contents


def _without_defaults(written: DictConfig) -> DictConfig:
    container = OmegaConf.to_container(written, resolve=False)
    assert isinstance(container, dict)
    return OmegaConf.create({key: value for key, value in container.items() if key != _DEFAULTS})


def _entries(path: Path, container: Any) -> list[tuple[str, str]]:
    """Returns name and package of every entry of `defaults`."""
    entries: list[tuple[str, str]] = []
    found = container.get(_DEFAULTS)
    for item in found if isinstance(found, list) else [] if found is None else [found]:
        if isinstance(item, dict) and len(item) == 1:
            ((group, choice),) = item.items()
            head, _, package = str(group).partition("@")
            if head.startswith("override ") or choice is None:
                continue
            entries.append((f"{head.removeprefix('optional ')}/{choice}", package))
        elif isinstance(item, str):
            name, _, package = item.removeprefix("optional ").partition("@")
            entries.append((name, package))
        else:
            raise ConfigError(f"{path}: `defaults` hold {item!r}; allowed: entries such as ../config/traj_envs@_here_")
    return entries


def _check_agentic(path: Path, tree: RollTree) -> None:
    if tree.children(("train_env_manager",)) and tree.children(("custom_envs",)):
        return
    other = [kind for key, kind in _OTHER_PIPELINES.items() if tree.below((key,))]
    what = f"; it looks like one of the {other[0]} pipeline" if other else ""
    raise ConfigError(
        f"{path} is no configuration of ROLL's agentic pipeline: it needs the sections train_env_manager and "
        f"custom_envs{what}"
    )
