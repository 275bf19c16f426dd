"""`rollwire env new`: the project that it writes passes its own tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_project_passes_its_own_tests(tmp_path: Path) -> None:
    made = run(tmp_path, "rollwire.cli.main", "env", "new", "guess-number")
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("GuessNumber in guess-number:\n  pyproject.toml\n")
    project = tmp_path / "guess-number"
    metadata = tomllib.loads((project / "pyproject.toml").read_text())
    assert metadata["project"]["entry-points"]["rollwire.environments"] == {"guess-number": "guess_number:GuessNumber"}
    assert "$" not in "".join(path.read_text() for path in project.rglob("*") if path.is_file())
    tested = run(project, "pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0, tested.stdout
    assert " passed" in tested.stdout
    checked = run(project, "ruff", "check", "--isolated", "--select", "E,F,UP,B", "--line-length", "120", ".")
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Guess Number", "DIR is named 'Guess Number', from which the package gets its name"),
        ("class", "a letter first and no keyword of Python"),
        ("9-lives", "a letter first and no keyword of Python"),
        ("json", "a name that is taken; choose another, such as my-json"),
        ("rollwire", "a name that is taken; choose another, such as my-rollwire"),
        ("full", "full exists and is not empty; choose a new directory"),
        ("file", "file exists and is not empty"),
        ("file/below", "cannot write file/below: Not a directory"),
    ],
)
def test_directories_that_cannot_be_used(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    (tmp_path / "file").touch()
    made = run(tmp_path, "rollwire.cli.main", "env", "new", name)
    assert made.returncode == 2
    assert problem in made.stderr
    assert "Traceback" not in made.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]
