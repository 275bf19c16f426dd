"""Pause, Resume and the modes of an update, over the wire."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import rollout_pb2, trajectory_pb2, weights_pb2

FENCE = trajectory_pb2.Fence(run_id="run", epoch=1)
ABORT, KEEP = rollout_pb2.PAUSE_MODE_ABORT, rollout_pb2.PAUSE_MODE_KEEP
ABORTED = trajectory_pb2.STOP_REASON_ABORTED


def pause(mode: Any = ABORT, lease_s: float = 30.0, **changes: Any) -> rollout_pb2.PauseRequest:
    lease = Duration()
    lease.FromNanoseconds(int(lease_s * 1e9))
    return rollout_pb2.PauseRequest(**{"fence": FENCE, "mode": mode, "lease": lease, **changes})


async def resume(bench: Any) -> None:
    await bench.client.resume(rollout_pb2.ResumeRequest(fence=FENCE))


class Generation:
    """A greedy generation that is being received."""

    def __init__(self, bench: Any, max_tokens: int = 400) -> None:
        request = rollout_pb2.GenerateRequest(
            token_ids=[3, 4, 5],
            sampling=trajectory_pb2.SamplingSettings(max_tokens=max_tokens, temperature=0, stop_token_ids=[0]),
            seed=1,
        )
        self.pieces: list[rollout_pb2.GenerateResponse] = []
        self.begun = asyncio.Event()
        self._stream = bench.client.generate(request, timeout_s=30)
        self.task = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        async for piece in self._stream:
            self.pieces.append(piece)
            self.begun.set()

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.token_ids]

    @property
    def steps(self) -> list[int]:
        return sorted({piece.version.step for piece in self.pieces if piece.token_ids})


async def begun(bench: Any) -> Generation:
    generation = Generation(bench)
    await generation.begun.wait()
    return generation


async def test_nothing_starts_during_a_pause_and_everything_after_it(serve: Any) -> None:
    async with serve() as bench:
        assert (await bench.client.pause(pause())).interrupted == 0
        assert (await bench.client.get_info()).paused
        generation = Generation(bench, max_tokens=3)
        playing = asyncio.create_task(bench.play())
        await asyncio.sleep(0.1)
        assert not generation.pieces and not bench.environments.actions
        await resume(bench)
        await resume(bench)
        await generation.task
        assert len(generation.tokens) == 3
        assert all(result.HasField("trajectory") for result in await playing)
        assert not (await bench.client.get_info()).paused


async def test_a_pause_aborts_or_keeps_what_runs(serve: Any) -> None:
    async with serve() as bench:
        whole = Generation(bench)
        await whole.task
        aborted, also = await begun(bench), await begun(bench)
        assert (await bench.client.pause(pause(ABORT))).interrupted == 2
        await asyncio.gather(aborted.task, also.task)
        assert aborted.pieces[-1].stop_reason == ABORTED and 0 < len(aborted.tokens) < 400
        assert aborted.tokens == whole.tokens[: len(aborted.tokens)]
        await resume(bench)

        kept = await begun(bench)
        assert (await bench.client.pause(pause(KEEP))).interrupted == 1
        drawn = len(kept.tokens)
        await asyncio.sleep(0.05)
        assert not kept.task.done() and drawn < 400
        await resume(bench)
        await kept.task
        # The same weights go on, so nothing but the wait shows.
        assert kept.tokens == whole.tokens
        assert kept.pieces[-1].stop_reason == trajectory_pb2.STOP_REASON_MAX_TOKENS


async def test_a_lease_ends_the_pause_and_a_repeat_renews_it(serve: Any) -> None:
    async with serve() as bench:
        await bench.client.pause(pause(lease_s=0.05))
        generation = Generation(bench, max_tokens=3)
        async with asyncio.timeout(5):
            await generation.task
        await bench.client.pause(pause(lease_s=0.05))
        await bench.client.pause(pause(lease_s=30))
        await asyncio.sleep(0.15)
        assert (await bench.client.get_info()).paused
        await bench.client.pause(pause(lease_s=0.05))
        await asyncio.sleep(0.15)
        assert not (await bench.client.get_info()).paused


async def test_an_update_goes_on_during_a_pause_which_lasts(serve: Any) -> None:
    async with serve() as bench:
        kept = await begun(bench)
        await bench.client.pause(pause(KEEP))
        await bench.update(1)
        assert (await bench.client.get_info()).active_version == bench.version(1)
        await asyncio.sleep(0.05)
        assert not kept.task.done()
        await resume(bench)
        await kept.task
        assert kept.steps == [0, 1] and len(kept.tokens) == 400


async def update(bench: Any, step: int, mode: Any) -> None:
    request = rollout_pb2.UpdateWeightsRequest(
        fence=FENCE,
        version=bench.version(step),
        source=weights_pb2.WeightSource(target=bench.learner_address),
        pause_mode=mode,
    )
    await bench.client.update_weights(request, timeout_s=20)


async def test_an_update_aborts_or_keeps_what_runs(serve: Any) -> None:
    async with serve() as bench:
        aborted = await begun(bench)
        await update(bench, 1, ABORT)
        await aborted.task
        assert aborted.pieces[-1].stop_reason == ABORTED and aborted.steps == [0]

        await update(bench, 0, ABORT)
        kept = await begun(bench)
        await update(bench, 1, KEEP)
        await kept.task
        assert kept.steps == [0, 1] and len(kept.tokens) == 400
        old = [token for piece in kept.pieces if piece.version.step == 0 for token in piece.token_ids]
        new = [token for piece in kept.pieces if piece.version.step == 1 for token in piece.token_ids]
        assert old + new == kept.tokens
        # What the new version drew is what it draws after the tokens of the old one, and nothing else.
        request = rollout_pb2.GenerateRequest(
            token_ids=[3, 4, 5, *old],
            sampling=trajectory_pb2.SamplingSettings(max_tokens=len(new), temperature=0, stop_token_ids=[0]),
        )
        again = [token async for piece in bench.client.generate(request, timeout_s=20) for token in piece.token_ids]
        assert new == again


async def test_kept_episodes_name_a_version_per_span(serve: Any) -> None:
    async with serve() as bench:
        sampling = trajectory_pb2.SamplingSettings(max_tokens=60, stop_token_ids=[0])
        bench.environments.script.turns = 4
        playing = asyncio.create_task(bench.play(sampling=sampling, max_episode_tokens=500))
        for step in (1, 2, 3, 4):
            drawn = (await bench.client.get_info()).generated_tokens
            while (await bench.client.get_info()).generated_tokens < drawn + 40:
                await asyncio.sleep(0.001)
            await update(bench, step, KEEP)
        results = await playing
        mixed = 0
        for result in results:
            trajectory = result.trajectory
            sequence = trajectory.sequences[0]
            named = [0] * len(sequence.token_ids)
            for span in sequence.version_spans:
                for position in range(span.range.begin, span.range.end):
                    named[position] += 1
            assert named == [int(sampled) for sampled in sequence.loss_mask]
            steps = [span.version.step for span in sequence.version_spans]
            assert steps == sorted(steps)
            mixed += len(sequence.version_spans) > len(trajectory.turns)
        assert len(results) == 3 and mixed


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"lease_s": 0.0}, "lease"),
        ({"lease_s": 3601.0}, "lease"),
        ({"mode": 7}, "mode"),
        ({"fence": trajectory_pb2.Fence(epoch=1)}, "fence.run_id"),
    ],
)
async def test_fields_outside_their_range(serve: Any, changes: dict[str, Any], field: str) -> None:
    async with serve() as bench:
        with pytest.raises(RollwireError) as caught:
            await bench.client.pause(pause(**changes))
        assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT and list(caught.value.fields) == [field]
        assert not (await bench.client.get_info()).paused
        with pytest.raises(RollwireError) as caught:
            await update(bench, 1, 9)
        assert list(caught.value.fields) == ["pause_mode"]


async def test_a_replaced_coordinator_cannot_pause_or_resume(serve: Any) -> None:
    async with serve() as bench:
        await bench.client.pause(pause(fence=trajectory_pb2.Fence(run_id="run", epoch=2)))
        for call in (bench.client.pause(pause()), resume(bench)):
            with pytest.raises(RollwireError) as caught:
                await call
            assert caught.value.reason == Reason.FENCED
        assert (await bench.client.get_info()).paused
