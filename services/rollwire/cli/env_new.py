"""`rollwire env new`: writes an environment project that works and passes its tests."""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from keyword import iskeyword
from pathlib import Path
from string import Template
from typing import Final

from rollwire.rpc.ids import is_tag
from rollwire.serving.config import ConfigError

_NAME: Final = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_FILES: Final = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    "{module}/__init__.py": "environment.py.txt",
    "{module}/__main__.py": "main.py.txt",
    "tests/test_{module}.py": "test.py.txt",
}


def write_project(directory: Path) -> tuple[str, list[Path]]:
    """Writes a project; its names follow from the directory's.

    Args:
        directory: Does not exist, or is empty.

    Returns:
        The environment's tag, and the files that were written, relative to the directory.

    Raises:
        ConfigError: The directory is in use, or its name gives no names.
    """
    name = directory.resolve().name
    module = name.replace("-", "_")
    tag = "".join(part.capitalize() for part in module.split("_"))
    if _NAME.fullmatch(name) is None or iskeyword(module) or not is_tag(tag):
        raise ConfigError(
            f"DIR is named {name!r}, from which the package gets its name; allowed: lower-case letters, digits and "
            "hyphens, a letter first and no keyword of Python, such as guess-number"
        )
    if module in ("rollwire", "tests") or module in sys.stdlib_module_names:
        raise ConfigError(f"DIR is named {name!r}, a name that is taken; choose another, such as my-{name}")
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError(f"{directory} exists and is not empty; choose a new directory")
        templates = files("rollwire.cli") / "new_environment"
        written = []
        for path, template in _FILES.items():
            relative = Path(path.format(module=module))
            target = directory / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            text = Template((templates / template).read_text()).substitute(name=name, module=module, tag=tag)
            target.write_text(text)
            written.append(relative)
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error.strerror or error}") from error
    return tag, written
