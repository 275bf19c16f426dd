"""Guards of the repository's layout: namespace package, dependency direction, file sizes, what imports pull in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for root in ("services", "clients", "protos")
    for path in sorted((ROOT / root).rglob("*.py"))
    if "_pb2" not in path.name
]
SERVICES = ("environment", "rollout", "learner", "coordinator")
ALLOWED = {
    "v1": set(),
    "rpc": {"v1"},
    "client": {"v1", "rpc"},
    "compliance": {"v1", "rpc", "client"},
    "policies": set(),
    "serving": {"v1", "rpc", "client", "policies"},
    **{service: {"v1", "rpc", "client", "serving", "policies"} for service in SERVICES},
    "cli": {"v1", "rpc", "client", "serving", "policies", *SERVICES},
}


def _package(path: Path) -> str:
    return path.relative_to(ROOT).parts[2]


def _imports(path: Path) -> set[str]:
    """Returns the Rollwire packages that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rollwire"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("rollwire.")}
    return found


def test_no_root_is_a_regular_package() -> None:
    assert [str(path) for path in ROOT.glob("*/rollwire/__init__.py")] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_dependency_direction_and_size(path: Path) -> None:
    package = _package(path)
    assert _imports(path) - {package} <= ALLOWED[package]
    assert len(path.read_text().splitlines()) <= 500


@pytest.mark.parametrize("module", ["rollwire.client", "rollwire.environment.service", "rollwire.cli.main"])
def test_import_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules or 'transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_no_pickle_anywhere() -> None:
    banned = ("pickle", "cloudpickle", "dill", "marshal", "shelve")
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        assert not names & set(banned), path
