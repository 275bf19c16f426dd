"""Sleep and Wake over the wire: nothing generates meanwhile, nothing is lost, and what serves is what is held."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
import torch

from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import rollout_pb2, trajectory_pb2

HOST, DISCARD = rollout_pb2.SLEEP_LEVEL_HOST, rollout_pb2.SLEEP_LEVEL_DISCARD
AWAKE = rollout_pb2.SLEEP_LEVEL_UNSPECIFIED
FENCE = trajectory_pb2.Fence(run_id="run", epoch=1)


async def sleep(bench: Any, level: int = HOST) -> int:
    answer = await bench.client.sleep(rollout_pb2.SleepRequest(fence=FENCE, level=level), timeout_s=20)
    return int(answer.freed_bytes)


async def wake(bench: Any) -> rollout_pb2.WakeResponse:
    return await bench.client.wake(rollout_pb2.WakeRequest(fence=FENCE), timeout_s=20)


async def level(bench: Any) -> int:
    return int((await bench.client.get_info()).sleep_level)


async def sample(bench: Any, max_tokens: int = 8) -> tuple[list[int], list[float], set[int]]:
    request = rollout_pb2.GenerateRequest(
        token_ids=[3, 4, 5], sampling=trajectory_pb2.SamplingSettings(max_tokens=max_tokens, stop_token_ids=[0]), seed=1
    )
    tokens: list[int] = []
    logprobs: list[float] = []
    steps = set()
    async for piece in bench.client.generate(request, timeout_s=20):
        tokens += piece.token_ids
        logprobs += piece.logprobs
        steps.add(piece.version.step)
    return tokens, logprobs, steps


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(RollwireError) as caught:
        await call
    return caught.value.code, caught.value.reason


ASLEEP = (grpc.StatusCode.FAILED_PRECONDITION, Reason.ASLEEP)


def engine(bench: Any) -> Any:
    return bench.server._servicer.parts.policy.engine


async def test_after_sleep_that_keeps_the_same_weights_serve(serve: Any) -> None:
    async with serve(active=2) as bench:
        before, digest = await sample(bench), (await bench.client.get_info()).active_digest
        assert await sleep(bench, AWAKE) == 0, "on CPU no device memory is given back"
        assert await level(bench) == HOST
        assert await sleep(bench) == 0
        assert (await wake(bench)).active_version == bench.version(2)
        assert await level(bench) == AWAKE
        assert await sample(bench) == before
        check = await bench.client.check_weights(rollout_pb2.CheckWeightsRequest(), timeout_s=20)
        assert check.digest == digest
        assert (await wake(bench)).active_version == bench.version(2), "waking twice does nothing"


async def test_after_weights_are_dropped_nothing_serves_until_an_update(serve: Any) -> None:
    async with serve(active=1) as bench:
        before = await sample(bench)
        await sleep(bench, DISCARD)
        assert await level(bench) == DISCARD
        assert not (await bench.client.get_info()).HasField("active_version")
        assert await refused(bench.play()) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.NO_WEIGHTS)
        assert not (await wake(bench)).HasField("active_version")
        assert (await refused(sample(bench)))[1] == Reason.NO_WEIGHTS
        fetches = bench.learner.fetches
        answer = await bench.update(1)
        assert answer.received_bytes == 0 and bench.learner.fetches == fetches, "host memory still has this version"
        assert await sample(bench) == before
        await sleep(bench, DISCARD)
        await wake(bench)
        assert (await bench.update(2)).received_bytes > 0
        assert (await sample(bench))[2] == {2}


async def test_what_waits_for_dropped_weights_ends_when_the_server_wakes_without_them(serve: Any) -> None:
    async with serve() as bench:
        script = bench.environments.script
        script.never_ends, script.max_turns, script.step_s = True, 100, 0.1
        playing = asyncio.create_task(bench.play())
        await bench.environments.stepped.wait()
        await sleep(bench, DISCARD)
        waiting = asyncio.create_task(refused(sample(bench)))
        await wake(bench)
        assert (await waiting)[1] == Reason.NO_WEIGHTS
        failures = [result.failure for result in await playing]
        assert len(failures) == 3
        for failure in failures:
            assert failure.reason == trajectory_pb2.FAILURE_REASON_GENERATION_ERROR
            assert Reason.NO_WEIGHTS in failure.message
        await bench.update(1)
        assert (await sample(bench))[2] == {1}


async def test_what_is_kept_may_be_dropped_later_but_not_the_other_way(serve: Any) -> None:
    async with serve() as bench:
        await sleep(bench, HOST)
        await sleep(bench, DISCARD)
        assert await level(bench) == DISCARD
        assert await refused(sleep(bench, HOST)) == ASLEEP
        assert not (await wake(bench)).HasField("active_version")


async def test_while_asleep_an_update_is_staged_and_then_costs_no_fetch(serve: Any) -> None:
    async with serve() as bench:
        await sleep(bench)
        assert await refused(bench.update(0)) == ASLEEP, "also of the version that will serve again"
        assert await refused(bench.update(1)) == ASLEEP
        assert await refused(bench.update(2)) == ASLEEP
        assert await refused(bench.client.check_weights(rollout_pb2.CheckWeightsRequest(), timeout_s=20)) == ASLEEP
        fetches = bench.learner.fetches
        assert await refused(bench.update(2)) == ASLEEP
        assert (await wake(bench)).active_version == bench.version(0)
        assert (await sample(bench))[2] == {0}
        assert (await bench.update(2)).received_bytes == 0 and bench.learner.fetches == fetches
        assert (await sample(bench))[2] == {2}
        assert (await bench.update(3)).received_bytes > 0
        assert (await sample(bench))[2] == {3}


async def test_no_sleep_while_a_version_is_being_staged(serve: Any) -> None:
    async with serve() as bench:
        bench.learner.hold.clear()
        update = asyncio.create_task(bench.update(1))
        while bench.learner.fetches < 2:
            await asyncio.sleep(0.01)
        assert await refused(sleep(bench)) == (grpc.StatusCode.ABORTED, Reason.UPDATE_IN_PROGRESS)
        bench.learner.hold.set()
        await update
        await sleep(bench)
        assert await level(bench) == HOST


async def test_episodes_wait_and_are_all_there_afterwards(serve: Any) -> None:
    async with serve(rollout={"max_new_tokens_per_turn": 4}) as bench:
        bench.environments.script.turns = 6
        bench.environments.script.step_s = 0.05
        playing = asyncio.create_task(bench.play(episodes=4))
        await bench.environments.stepped.wait()
        await sleep(bench)
        generated = (await bench.client.get_info()).generated_tokens
        waiting = asyncio.create_task(sample(bench))
        await asyncio.sleep(0.3)
        info = await bench.client.get_info()
        assert info.generated_tokens == generated and info.running_episodes == 4 and not waiting.done()
        await wake(bench)
        results = await playing
        assert len([result for result in results if result.HasField("trajectory")]) == 4
        assert (await waiting)[0]


async def test_without_memory_it_stays_asleep_and_wakes_later(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(active=1) as bench:
        before = await sample(bench)
        await sleep(bench)

        async def no_memory() -> None:
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB\nwith a second line")

        monkeypatch.setattr(engine(bench), "wake", no_memory)
        with pytest.raises(RollwireError, match="allocate 2") as caught:
            await wake(bench)
        assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.reason == Reason.DEVICE_MEMORY_EXHAUSTED and caught.value.retry_after_s
        assert await level(bench) == HOST and await refused(bench.update(1)) == ASLEEP
        monkeypatch.undo()
        assert (await wake(bench)).active_version == bench.version(1)
        assert await sample(bench) == before


@pytest.mark.parametrize("method", ["sleep", "wake"])
async def test_after_any_other_fault_nothing_serves_until_an_update(
    serve: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async with serve(active=1) as bench:
        before = await sample(bench)
        if method == "wake":
            await sleep(bench)

        async def fault(*_: Any) -> int:
            raise RuntimeError("unmapping failed")

        monkeypatch.setattr(engine(bench), method, fault)
        code, reason = await refused(sleep(bench) if method == "sleep" else wake(bench))
        assert (code, reason) == (grpc.StatusCode.INTERNAL, Reason.INTERNAL)
        monkeypatch.undo()
        info = await bench.client.get_info()
        assert info.sleep_level == DISCARD and not info.HasField("active_version")
        assert not (await wake(bench)).HasField("active_version")
        assert (await refused(sample(bench)))[1] == Reason.NO_WEIGHTS
        await bench.update(1)
        assert await sample(bench) == before


async def test_a_caller_that_goes_away_does_not_stop_it_and_the_next_one_waits_for_it(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as bench:
        begun, go_on, whole = asyncio.Event(), asyncio.Event(), engine(bench).sleep

        async def slow(level: int) -> int:
            begun.set()
            await go_on.wait()
            return int(await whole(level)) + 7

        monkeypatch.setattr(engine(bench), "sleep", slow)
        first = asyncio.create_task(sleep(bench))
        await begun.wait()
        first.cancel()
        others = [asyncio.create_task(sleep(bench)), asyncio.create_task(sleep(bench, DISCARD))]
        assert await level(bench) == AWAKE and await refused(bench.update(1)) == ASLEEP
        await asyncio.sleep(0.1)
        go_on.set()
        freed = [await other for other in others]
        assert freed[0] in (7, 14) and freed[1] == 14, "each answer counts what has been freed so far"
        assert await level(bench) == DISCARD


async def test_weights_that_are_being_read_back_stay_until_that_has_ended(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as bench:
        begun, go_on, whole, slept = asyncio.Event(), asyncio.Event(), engine(bench).held_digest, engine(bench).sleep
        order: list[str] = []

        async def slow() -> bytes:
            begun.set()
            await go_on.wait()
            order.append("read")
            return bytes(await whole())

        async def noted(level: int) -> int:
            order.append("slept")
            return int(await slept(level))

        monkeypatch.setattr(engine(bench), "held_digest", slow)
        monkeypatch.setattr(engine(bench), "sleep", noted)
        check = asyncio.create_task(bench.client.check_weights(rollout_pb2.CheckWeightsRequest(), timeout_s=20))
        await begun.wait()
        sleeping = asyncio.create_task(sleep(bench))
        await asyncio.sleep(0.1)
        go_on.set()
        assert (await check).version == bench.version(0)
        await sleeping
        assert order == ["read", "slept"]


async def test_a_pause_outlives_sleep(serve: Any) -> None:
    async with serve() as bench:
        await bench.client.pause(rollout_pb2.PauseRequest(fence=FENCE), timeout_s=20)
        await sleep(bench)
        await wake(bench)
        waiting = asyncio.create_task(sample(bench))
        await asyncio.sleep(0.2)
        assert (await bench.client.get_info()).paused and not waiting.done()
        await bench.client.resume(rollout_pb2.ResumeRequest(fence=FENCE), timeout_s=20)
        assert (await waiting)[0]


async def test_an_old_coordinator_changes_nothing(serve: Any) -> None:
    async with serve() as bench:
        newer = trajectory_pb2.Fence(run_id="run", epoch=2)
        await bench.client.sleep(rollout_pb2.SleepRequest(fence=newer), timeout_s=20)
        assert (await refused(wake(bench)))[1] == Reason.FENCED
        assert await level(bench) == HOST
        assert (await refused(bench.client.sleep(rollout_pb2.SleepRequest(fence=newer, level=9))))[1] == "INVALID_FIELD"


async def test_an_engine_without_the_means_refuses(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as bench:
        object.__setattr__(engine(bench).description, "sleep_disabled", "set rollout.vllm.sleep_mode=true")
        code, reason = await refused(sleep(bench))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.SLEEP_DISABLED)
        assert await level(bench) == AWAKE and (await sample(bench))[0]
