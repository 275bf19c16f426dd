"""The Node client, as its lock file wants it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NODE = Path(__file__).parents[2] / "clients" / "node"


@pytest.fixture(scope="session")
def node_modules() -> None:
    """The Node client's dependencies, exactly those of its lock file."""
    npm = shutil.which("npm")
    assert npm is not None, "npm is not installed"
    if not (NODE / "node_modules" / ".package-lock.json").exists():
        subprocess.run([npm, "ci", "--no-audit", "--no-fund"], cwd=NODE, check=True, timeout=300)
