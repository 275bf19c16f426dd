"""CheckWeights: what the engine holds is read back, and weights that changed without an update serve nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
import torch

from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.weight_stream import build_manifest
from rollwire.serving.model_tensors import to_host
from rollwire.v1 import rollout_pb2, trajectory_pb2

REQUEST = rollout_pb2.CheckWeightsRequest()
DATA_LOSS, PRECONDITION = grpc.StatusCode.DATA_LOSS, grpc.StatusCode.FAILED_PRECONDITION


def engine_of(bench: Any) -> Any:
    return bench.server._servicer.parts.policy.engine


def change_one_bit(bench: Any) -> None:
    """Flips the lowest bit of one value, as faulty memory would."""
    parameter = list(engine_of(bench)._model.parameters())[3]
    parameter.data.view(torch.int32).flatten()[5] ^= 1


def generate(bench: Any, max_tokens: int = 4) -> Any:
    sampling = trajectory_pb2.SamplingSettings(max_tokens=max_tokens, stop_token_ids=[0])
    return bench.client.generate(
        rollout_pb2.GenerateRequest(token_ids=[3, 4, 5], sampling=sampling, seed=1), timeout_s=20
    )


async def refused(bench: Any, request: rollout_pb2.CheckWeightsRequest = REQUEST) -> RollwireError:
    with pytest.raises(RollwireError) as caught:
        await bench.client.check_weights(request, timeout_s=10)
    return caught.value


async def test_weights_read_back_are_those_that_the_learner_published(serve: Any, weights: Any) -> None:
    async with serve(active=2) as bench:
        answer = await bench.client.check_weights(REQUEST, timeout_s=10)
        manifest = build_manifest(bench.version(2), weights(2))
        assert (answer.version, answer.digest) == (manifest.version, manifest.digest)
        assert (answer.tensors, list(answer.unverified)) == (len(manifest.tensors), [])
        assert [piece async for piece in generate(bench)], "a check leaves everything as it was"


async def test_bfloat16_weights_are_read_back_as_they_came(serve: Any, weights: Any) -> None:
    async with serve(active=None, model={"dtype": "bfloat16"}) as bench:

        def rounded(step: int) -> Any:
            return {
                name: to_host(torch.frombuffer(bytearray(t.data), dtype=torch.float32).view(t.shape), torch.bfloat16)
                for name, t in weights(step).items()
            }

        bench.learner.weights = rounded
        updated = await bench.update(1)
        assert (await bench.client.check_weights(REQUEST, timeout_s=10)).digest == updated.digest


async def test_a_tensor_changed_behind_the_engines_back_stops_serving_until_an_update(serve: Any) -> None:
    async with serve() as bench:
        change_one_bit(bench)
        error = await refused(bench)
        assert (error.code, error.reason) == (DATA_LOSS, Reason.WEIGHTS_CORRUPT)
        assert "lineage-test@0" in error.message and "nothing is served" in error.message
        with pytest.raises(RollwireError) as caught:
            await bench.play()
        assert (caught.value.code, caught.value.reason) == (PRECONDITION, Reason.NO_WEIGHTS)
        assert not (await bench.client.get_info()).HasField("active_version")
        assert (await refused(bench)).reason == Reason.NO_WEIGHTS

        await bench.update(0)
        await bench.client.check_weights(REQUEST, timeout_s=10)
        assert [piece async for piece in generate(bench)]


async def test_what_runs_when_a_mismatch_is_found_is_aborted(serve: Any) -> None:
    async with serve() as bench:
        running = generate(bench, max_tokens=400)
        pieces = [await anext(running)]
        change_one_bit(bench)
        assert (await refused(bench)).reason == Reason.WEIGHTS_CORRUPT
        pieces += [piece async for piece in running]
        assert pieces[-1].stop_reason == trajectory_pb2.STOP_REASON_ABORTED
        assert sum(len(piece.token_ids) for piece in pieces) < 400


async def test_a_check_disturbs_no_generation(serve: Any) -> None:
    async def drawn() -> list[int]:
        return [token async for piece in generate(bench, 60) for token in piece.token_ids]

    async with serve() as bench:
        alone = await drawn()
        task = asyncio.create_task(drawn())
        answers = [await bench.client.check_weights(REQUEST, timeout_s=10) for _ in range(5)]
        assert await task == alone
        assert len({answer.digest for answer in answers}) == 1


async def test_callers_that_come_together_share_one_reading(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as bench:
        engine, readings, go_on = engine_of(bench), [], asyncio.Event()
        read = engine.held_digest

        async def slow() -> bytes:
            readings.append(1)
            await go_on.wait()
            return await read()

        monkeypatch.setattr(engine, "held_digest", slow)
        checks = [asyncio.create_task(bench.client.check_weights(REQUEST, timeout_s=10)) for _ in range(3)]
        while not readings:
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(anext(generate(bench)))
        await asyncio.sleep(0.2)
        assert not waiting.done(), "generations wait meanwhile"
        go_on.set()
        assert len({answer.digest for answer in await asyncio.gather(*checks)}) == 1
        assert len(readings) == 1
        assert (await waiting).token_ids


async def test_not_while_a_version_is_being_staged(serve: Any) -> None:
    async with serve() as bench:
        bench.learner.hold.clear()
        update = asyncio.create_task(bench.update(1))
        while bench.learner.fetches < 2:
            await asyncio.sleep(0.01)
        error = await refused(bench)
        assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, Reason.UPDATE_IN_PROGRESS)
        assert error.retry_after_s
        bench.learner.hold.set()
        await update
        assert (await bench.client.check_weights(REQUEST, timeout_s=10)).version.step == 1


async def test_an_update_that_overtakes_a_check_is_no_mismatch(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as bench:
        engine = engine_of(bench)
        read, reading, updated = engine.held_digest, asyncio.Event(), asyncio.Event()

        async def late() -> bytes:
            reading.set()
            await updated.wait()
            return await read()

        monkeypatch.setattr(engine, "held_digest", late)
        check = asyncio.create_task(refused(bench))
        await reading.wait()
        await bench.update(1)
        updated.set()
        assert (await check).reason == Reason.UPDATE_IN_PROGRESS
        assert (await bench.client.get_info()).active_version.step == 1


async def test_before_any_weights_and_from_a_replaced_coordinator(serve: Any) -> None:
    async with serve(active=None) as bench:
        error = await refused(bench)
        assert (error.code, error.reason) == (PRECONDITION, Reason.NO_WEIGHTS)
        await bench.update(0)
        fence = trajectory_pb2.Fence(run_id="run-a", epoch=2)
        await bench.client.check_weights(rollout_pb2.CheckWeightsRequest(fence=fence), timeout_s=10)
        old = trajectory_pb2.Fence(run_id="run-a", epoch=1)
        error = await refused(bench, rollout_pb2.CheckWeightsRequest(fence=old))
        assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, Reason.FENCED)
