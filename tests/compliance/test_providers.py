"""The compliance suite on providers: one in Python, one in JavaScript."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollwire.compliance import FailureCompliance, ProviderCompliance

ROOT = Path(__file__).parents[2]
NODE = ROOT / "clients" / "node"
MOVES = tuple(f"<answer>{move}</answer>" for move in ("Right", "Down", "Left", "Down", "Right", "Up"))


class TestPython(FailureCompliance, ProviderCompliance):
    tag = "Count"
    actions = ("one", "two", "three")
    failing_action = "raise"
    failure_type = "ZeroDivisionError"

    @classmethod
    def command(cls, target: str) -> Sequence[str]:
        plugins = ROOT / "tests" / "contract" / "providers" / "plugins"
        program = (
            f"import sys; sys.path.insert(0, {str(plugins)!r}); from provider_games import Counting; "
            f"from rollwire.client import serve_environment; serve_environment({target!r}, {{'Count': Counting}})"
        )
        return [sys.executable, "-c", program]


@pytest.mark.usefixtures("node_modules")
class TestNode(ProviderCompliance):
    tag = "FrozenLakeNode"
    actions = MOVES

    @classmethod
    def command(cls, target: str) -> Sequence[str]:
        node = shutil.which("node")
        assert node is not None, "node is not installed"
        return [node, str(NODE / "examples" / "serve_frozen_lake.js"), target]
