"""Reads a configuration file and overrides into a `RunConfig`, with errors that say what to do."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from rollwire.serving.config.models import RunConfig


class ConfigError(Exception):
    """The configuration cannot be used; the text is one or more lines for the user."""


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Loads a configuration.

    Args:
        path: YAML file; None means all defaults.
        overrides: `key.path=value` pairs, applied after the file; values are YAML. An entry of a list that the file
            holds is named by its number, as in `environments.0.weight=2`.

    Raises:
        ConfigError: The file is missing or broken, a key is unknown, or a value is not allowed.
    """
    merged = read_yaml(path)
    for item in overrides:
        _apply_override(merged, item)
    try:
        plain = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"interpolation failed: {str(error).splitlines()[0]}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{path} holds no mapping at its top level; it needs sections such as `run:`")
    try:
        return RunConfig.model_validate(plain)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors(include_url=False))) from error


def dump_config(config: RunConfig) -> str:
    """Returns the configuration with all defaults resolved, as YAML that `load_config` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_yaml(path: Path | None) -> DictConfig:
    """Reads a YAML file that holds a mapping, interpolations left as they are; without a file there is nothing in it.

    Raises:
        ConfigError: It is missing, no YAML, or holds no mapping.
    """
    if path is None:
        return OmegaConf.create({})
    try:
        is_mapping = isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)
        # OmegaConf's own reader knows 1e-6 as a number, which plain YAML 1.1 takes for text.
        loaded = OmegaConf.load(path)
    except FileNotFoundError as error:
        raise ConfigError(f"configuration file {path} does not exist") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path} is a directory; a YAML file is needed") from error
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"configuration file {path} cannot be read as YAML: {text}") from error
    if not is_mapping or not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path} holds no mapping at its top level; it needs sections such as `run:`")
    return loaded


def _apply_override(config: DictConfig, item: str) -> None:
    key, equals, _ = item.partition("=")
    if not equals or not all(key.split(".")) or key.startswith("-"):
        raise ConfigError(f"override {item!r} is not of the form key.path=value, such as run.max_steps=10")
    try:
        config.merge_with_dotlist([item])
    except (OmegaConfBaseException, IndexError, TypeError) as error:
        text = " ".join(str(error).split()).partition(" full_key:")[0]
        raise ConfigError(
            f"override {item!r} cannot be applied: {text}; where the file holds a list, give the number of one of its "
            "entries, such as environments.0.weight=2, or the whole list"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"override {item!r} cannot be read: {' '.join(str(error).split())}") from error


def _explain(error: Any) -> str:
    """Turns one pydantic error into a line: key, value, what is allowed."""
    path = [str(part) for part in error["loc"]]
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        known = _keys_of(path[:-1])
        near = [".".join([*path[:-1], name]) for name in difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)]
        elsewhere = [full for full in _all_keys() if full.rpartition(".")[2] == path[-1]]
        hint = f"did you mean {(elsewhere + near)[0]}? " if elsewhere or near else ""
        return f"unknown key {key}; {hint}Known here: {', '.join(sorted(known))}"
    if error["type"] == "value_error":
        return str(error["msg"]).removeprefix("Value error, ")
    return f"{key} is {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _section(annotation: Any) -> type[BaseModel] | None:
    """Returns the section model in an annotation such as `list[Section]` or `dict[str, Section]`, if any."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation) if get_origin(annotation) else ():
        found = _section(inner)
        if found is not None:
            return found
    return None


def _keys_of(path: Sequence[str]) -> list[str]:
    """Returns the keys that a section may hold; indices and free names in the path are skipped."""
    model: type[BaseModel] = RunConfig
    for part in path:
        field = model.model_fields.get(part)
        inner = _section(field.annotation) if field is not None else None
        if inner is not None:
            model = inner
    return list(model.model_fields)


def _all_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Returns the full path of every key of the schema."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        inner = _section(field.annotation)
        if inner is not None:
            keys.extend(_all_keys(inner, f"{prefix}{name}."))
    return keys
