"""Weight updates of a rollout server that is busy: every token is the version's that it names, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import engine_kit as kit
import pytest

from rollwire.v1 import rollout_pb2, trajectory_pb2

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
WAIT, ABORT, KEEP = rollout_pb2.PAUSE_MODE_WAIT, rollout_pb2.PAUSE_MODE_ABORT, rollout_pb2.PAUSE_MODE_KEEP
MAX_TOKENS, ABORTED = trajectory_pb2.STOP_REASON_MAX_TOKENS, trajectory_pb2.STOP_REASON_ABORTED
MODES = pytest.mark.parametrize("mode", [WAIT, ABORT, KEEP], ids=["wait", "abort", "keep"])
TOKENS = 96
CALLERS = 8


@asynccontextmanager
async def callers(bench: Any, answers: list[Any], **sampling: Any) -> AsyncIterator[None]:
    """Keeps generations running, each ends well or the block raises."""
    stop, started = asyncio.Event(), asyncio.Event()

    async def call(number: int) -> None:
        seed = number * 1000
        while not stop.is_set():
            prompt = [(number * 7 + position) % 250 for position in range(5 + number)]
            answers.append(await bench.generate(prompt, TOKENS, seed, **sampling))
            seed += 1
            started.set()

    async with asyncio.TaskGroup() as group:
        for number in range(CALLERS):
            group.create_task(call(number))
        await asyncio.wait_for(started.wait(), 30)
        yield
        stop.set()


@MODES
async def test_generations_while_versions_change(bench: Any, mode: int) -> None:
    answers: list[Any] = []
    first = len(bench.learner.models)
    async with callers(bench, answers):
        for _ in range(4):
            manifest, answer = await bench.update(mode, 0.01)
            assert answer.digest == manifest.digest
            # Enough for answers under this version alone.
            await bench.drawn(2 * TOKENS)
    reasons = {reason for _, reason in answers}
    versions = [[span.version.step for span in sequence.version_spans] for sequence, _ in answers]
    assert {step for steps in versions for step in steps} >= {first, first + 1, first + 2}
    assert all(steps == sorted(steps) for steps in versions)
    mixed = [steps for steps in versions if len(set(steps)) > 1]
    if mode == KEEP:
        assert mixed
    else:
        assert not mixed
    assert (ABORTED in reasons) == (mode == ABORT)
    assert reasons <= {MAX_TOKENS, ABORTED}
    for sequence, reason in answers:
        if reason == MAX_TOKENS:
            assert sum(sequence.loss_mask) == TOKENS
    bound = kit.LOGPROB_BOUNDS[bench.device, "float32"]
    assert max(bench.learner.logprob_gaps(sequence for sequence, _ in answers)) < bound
    # Another version would have been told apart.
    assert max(bench.learner.logprob_gaps((sequence for sequence, _ in answers[-8:]), shift=-1)) > 10 * bound


@MODES
async def test_raw_log_probabilities_while_versions_change(bench: Any, mode: int) -> None:
    """Engines may score what was drawn afterwards; it has to be by the version that drew it."""
    answers: list[Any] = []
    async with callers(bench, answers, temperature=0.7, logprob_mode=trajectory_pb2.LOGPROB_MODE_RAW):
        for _ in range(3):
            await bench.drawn(TOKENS)
            await bench.update(mode, 0.01)
    assert {reason for _, reason in answers} <= {MAX_TOKENS, ABORTED}
    assert sum(reason == MAX_TOKENS for _, reason in answers) >= CALLERS
    gaps = bench.learner.logprob_gaps(sequence for sequence, _ in answers)
    assert max(gaps) < kit.LOGPROB_BOUNDS[bench.device, "float32"]


@MODES
async def test_episodes_while_versions_change(bench: Any, mode: int) -> None:
    first = len(bench.learner.models) - 1
    playing = [asyncio.create_task(bench.play(sampling_seed=seed, environment_seed=seed)) for seed in range(3)]
    for _ in range(4):
        await bench.drawn(200, playing)
        await bench.update(mode, 0.01)
    results = [result for task in playing for result in await task]
    assert len(results) == 3 * 8
    played = [result.trajectory for result in results if result.HasField("trajectory")]
    # Updates may cut one turn more often than it is drawn again; that is a failure with a reason.
    failures = [result.failure for result in results if result.HasField("failure")]
    assert all(mode == ABORT and "cut this turn" in failure.message for failure in failures)
    assert len(played) + len(failures) == len(results) and len(played) > 12
    sequences = [sequence for trajectory in played for sequence in trajectory.sequences]
    steps = {span.version.step for sequence in sequences for span in sequence.version_spans}
    assert len(steps) > 1 and min(steps) >= first
    assert max(bench.learner.logprob_gaps(sequences)) < kit.LOGPROB_BOUNDS[bench.device, "float32"]
    if mode != KEEP:
        for trajectory in played:
            for turn in trajectory.turns:
                assert len(versions_of(trajectory, turn)) == 1


def versions_of(trajectory: Any, turn: Any) -> set[int]:
    spans = trajectory.sequences[turn.sequence].version_spans
    return {
        span.version.step
        for span in spans
        if span.range.begin < turn.response.end and turn.response.begin < span.range.end
    }


async def test_a_few_changed_tensors_arrive_as_changes(bench: Any) -> None:
    whole = (await bench.update(WAIT))[0].payload_bytes
    for only in ("layers.4.input_layernorm", "layers.0.self_attn.k_proj", "embed_tokens"):
        manifest, answer = await bench.update(WAIT, 0.05, only)
        assert answer.digest == manifest.digest
        assert answer.received_bytes < whole / 4
        sequence, _ = await bench.generate([9, 8, 7, 6], 30, 1)
        bound = kit.LOGPROB_BOUNDS[bench.device, "float32"]
        assert max(bench.learner.logprob_gaps([sequence])) < bound


async def test_an_update_without_any_change(bench: Any) -> None:
    before, _ = await bench.update(WAIT)
    manifest, answer = await bench.update(WAIT, 0.0)
    assert manifest.digest == before.digest == answer.digest
    assert manifest.version.step == before.version.step + 1
    sequence, _ = await bench.generate([9, 8, 7, 6], 5, 1)
    assert {span.version.step for span in sequence.version_spans} == {manifest.version.step}
