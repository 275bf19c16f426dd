"""A run whose environments dial in: one program in Python, one in JavaScript, trained on together."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .conftest import EXAMPLE, ROOT, SMALL, Run, command, environment

NODE = ROOT / "clients" / "node"
PYTHON_PROGRAM = """
import sys
from rollwire.client import serve_environment
from rollwire.environment.frozen_lake import FrozenLake
serve_environment(sys.argv[1], {"FrozenLakePython": FrozenLake})
"""
TAGS = ("FrozenLakeNode", "FrozenLakePython")


def up_to(text: str, lines: Iterable[str]) -> Iterator[str]:
    """Yields lines up to the first one that holds a text, and that one."""
    for line in lines:
        yield line
        if text in line:
            return


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def test_two_programs_dial_in_and_are_trained_on(tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    assert npm and node, "Node.js is not installed"
    subprocess.run([npm, "ci", "--no-audit", "--no-fund"], cwd=NODE, check=True, timeout=300, capture_output=True)
    launch = command(
        "launch",
        EXAMPLE,
        *SMALL,
        "run.max_steps=2",
        "batch.groups_per_step=8",
        f"run.output_dir={tmp_path}",
        "environments=[{tag: FrozenLakeNode}, {tag: FrozenLakePython}]",
    )
    with running(*launch) as process:
        assert process.stdout is not None
        told = list(up_to("does not offer FrozenLakeNode", process.stdout))
        (ready,) = tmp_path.glob("runs/*/*/environment.json")
        target = json.loads(ready.read_text())["address"]
        with (
            running(node, str(NODE / "examples" / "serve_frozen_lake.js"), target) as in_node,
            running(sys.executable, "-c", PYTHON_PROGRAM, target) as in_python,
        ):
            output, errors = process.communicate(timeout=300)
            output = "".join(told) + output
            assert process.returncode == 0, output + errors
            providers = {"Node": in_node, "Python": in_python}
            for provider in providers.values():
                provider.terminate()
            said = {name: provider.communicate(timeout=60)[1] for name, provider in providers.items()}
    assert "yet: waiting up to timeouts.ready_s=300 s" in " ".join(output.split())
    assert "Traceback" not in output + errors + "".join(said.values())
    assert {name: provider.returncode for name, provider in providers.items()} == {"Node": 0, "Python": 0}, said
    run = Run(output, ready.parent, tmp_path)
    counted = dict(
        run.query("SELECT environment_tag, COUNT(*) FROM groups JOIN trajectories USING (group_id) GROUP BY 1")
    )
    assert set(counted) == set(TAGS)
    metrics = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    for tag in TAGS:
        assert any(f"env/{tag}/success" in line for line in metrics)
