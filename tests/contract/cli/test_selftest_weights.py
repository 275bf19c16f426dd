"""`rollwire selftest weights` against real servers with the tiny policy, healthy and damaged on purpose."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollwire.cli.selftest_report import Report, diagnose
from rollwire.cli.selftest_steps import DEFAULTS, SETTINGS, WeightSelftest
from rollwire.cli.selftest_weights import make_prompts
from rollwire.client.learner import LearnerClient
from rollwire.client.rollout import RolloutClient
from rollwire.coordinator.assemble import gap_bound
from rollwire.learner.service import LearnerServer
from rollwire.rollout.service import RolloutServer
from rollwire.serving.config import load_config
from rollwire.serving.server import Binding, serving

Selftest = Callable[..., Any]


@pytest.fixture
async def selftest() -> AsyncIterator[Selftest]:
    """Returns a function that runs the test; `damage` gets the engine before anything is loaded."""

    async def run(damage: Callable[[Any], None] = lambda engine: None, *overrides: str) -> Report:
        config = load_config(None, ["device=cpu", "rollout.max_episode_tokens=256", *DEFAULTS, *overrides, *SETTINGS])
        learner_service, rollout_service = LearnerServer(config), RolloutServer(config)
        async with (
            serving(learner_service, Binding(), grace_s=0.5) as learning,
            serving(rollout_service, Binding(), grace_s=0.5) as playing,
            LearnerClient(learning.address) as learner,
            RolloutClient(playing.address) as rollout,
        ):
            damage(rollout_service._servicer.parts.policy.engine)
            bound = gap_bound(config, await learner.get_info(), [await rollout.get_info()])
            prompts = make_prompts(config)[::8]
            return await WeightSelftest(config, learner, rollout, prompts, 8, bound).run()

    yield run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_healthy_engine_passes(selftest: Selftest, dtype: str) -> None:
    report = await selftest(lambda engine: None, f"model.dtype={dtype}")
    assert diagnose(report) == ""
    first, trained, unchanged = report.stages
    assert first.received_bytes > 0 < trained.received_bytes and unchanged.received_bytes == 0
    assert first.digest != trained.digest == unchanged.digest
    assert report.moved > 0.01


async def test_weights_handed_over_on_one_host_pass_too(selftest: Selftest) -> None:
    report = await selftest(lambda engine: None, "rollout.same_host_weights=true")
    assert diagnose(report) == ""
    assert [stage.received_bytes for stage in report.stages] == [0, 0, 0]


def skewed(engine: Any) -> None:
    """The engine reports log-probabilities that are not those of its distribution."""
    generate = engine.generate

    async def wrong(request: Any) -> AsyncIterator[Any]:
        async for piece in generate(request):
            shift = 0.4 if request.sampling.temperature != 1 else 0.0
            yield replace(piece, logprobs=[value - shift for value in piece.logprobs])

    engine.generate = wrong


def forgetful(engine: Any) -> None:
    """The engine says that it holds new weights, and goes on with the first ones."""
    load, digest = engine.load_weights, engine.held_digest
    loaded: list[bytes] = []

    async def once(version: Any, tensors: Any, sha256: Any = None) -> bytes:
        if not loaded:
            loaded.append(await load(version, tensors, sha256))
        else:
            from rollwire.rpc.digests import weights_digest

            engine._loop.version = version
            loaded.append(weights_digest(sha256.items()))
        return loaded[-1]

    async def claimed() -> bytes:
        return loaded[-1] if len(loaded) > 1 else await digest()

    engine.load_weights, engine.held_digest = once, claimed


def scratched(engine: Any) -> None:
    """A tensor of the engine changes after it was loaded and compared."""
    load = engine.load_weights

    async def then_scratch(version: Any, tensors: Any, sha256: Any = None) -> bytes:
        held = await load(version, tensors, sha256)
        with torch.no_grad():
            list(engine._model.parameters())[2].view(-1)[0] += 1e-3
        return bytes(held)

    engine.load_weights = then_scratch


@pytest.mark.parametrize(
    ("damage", "stages", "said"),
    [
        (skewed, 1, "version 0: engine and learner differ by 0.4 nats, the bound is 0.0001, at temperature 0.7 alone"),
        (forgetful, 2, "they agreed before: the engine works with old weights"),
        (scratched, 1, "does not hold the weights that it was sent"),
    ],
)
async def test_a_damaged_engine_is_found_out(selftest: Selftest, damage: Any, stages: int, said: str) -> None:
    report = await selftest(damage)
    assert said in diagnose(report)
    assert len(report.stages) == stages


BROKEN = """
import sys
if "rollout" in sys.orig_argv:
    import torch
    from rollwire.rollout.engines.transformers_engine import TransformersEngine
    load = TransformersEngine.load_weights

    async def then_scratch(self, *arguments):
        held = await load(self, *arguments)
        with torch.no_grad():
            list(self._model.parameters())[2].view(-1)[0] += 1e-3
        return held

    TransformersEngine.load_weights = then_scratch
"""


def command(tmp_path: Path, *python_path: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*python_path, *(entry for entry in sys.path if entry)])
    example = Path(__file__).resolve().parents[3] / "deploy" / "configs" / "frozenlake-tiny.yaml"
    return subprocess.run(
        [sys.executable, "-m", "rollwire.cli.main", "selftest", "weights", example, f"run.output_dir={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100", "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.timeout(400)
def test_the_command_starts_both_servers_and_passes(tmp_path: Path) -> None:
    done = command(tmp_path / "output")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.splitlines()[-1].startswith("OK")
    assert done.stdout.count("= ") >= 3
    assert not list((tmp_path / "output").rglob("*/rollout.json")), "no server is left"


@pytest.mark.timeout(400)
def test_the_command_fails_when_a_server_process_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    done = command(tmp_path / "output", str(tmp_path))
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    verdict = done.stdout.splitlines()[-1]
    assert verdict.startswith("FAILED  version 0:") and "does not hold the weights" in verdict
    assert done.stderr == ""
