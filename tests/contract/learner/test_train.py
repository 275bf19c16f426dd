"""Train: a committed step, repeats, conflicts, refusals, and what other calls see meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch

from rollwire.client.weights import WeightsClient
from rollwire.learner import training
from rollwire.learner.torch_thread import TorchThread
from rollwire.learner.trainer import Trainer
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import learner_pb2, weights_pb2

Batch = Callable[..., list[learner_pb2.TrainSample]]
Connect = Callable[..., Any]


async def header(client: Any, step: int | None = None, epoch: int = 1, **changes: Any) -> learner_pb2.TrainHeader:
    version = (await client.get_info()).version
    if step is not None:
        version = weights_pb2.WeightVersion(lineage=version.lineage, step=step)
    fields: dict[str, Any] = {
        "fence": {"run_id": "run", "epoch": epoch},
        "base_version": version,
        "loss": {"clip_low": 0.2, "clip_high": 0.2},
        "optimizer_steps": 2,
        "shuffle_seed": 3,
    }
    return learner_pb2.TrainHeader(**{**fields, **changes})


async def refused(call: Any, reason: Reason, code: grpc.StatusCode) -> RollwireError:
    with pytest.raises(RollwireError) as caught:
        await call
    assert (caught.value.reason, caught.value.code) == (reason, code), caught.value
    return caught.value


async def test_a_step_advances_the_version_and_changes_the_weights(connect: Connect, batch: Batch) -> None:
    async with connect() as client:
        before = await client.get_info()
        answer = await client.train(await header(client), batch())
        after = await client.get_info()

    assert (before.version.step, answer.version.step) == (0, 1)
    assert answer.version == after.version and answer.version.lineage == before.version.lineage
    assert answer.digest == after.digest != before.digest
    assert len(answer.digest) == 32
    assert not answer.repeated_answer
    assert answer.duration.ToNanoseconds() > 0
    expected = {
        "actor/pg_loss",
        "actor/total_loss",
        "actor/entropy_loss",
        "critic/entropy/mean",
        "actor/ppo_ratio_high_clipfrac",
        "actor/ppo_ratio_low_clipfrac",
        "actor/ppo_ratio_clipfrac",
        "actor/clipfrac",
        "actor/ratio_mean",
        "actor/ratio_max",
        "actor/ratio_min",
        "actor/approxkl",
        "actor/policykl",
        "actor/lr",
        "actor/backward_steps",
        "actor/skipped_steps",
        "actor/logprob_gap_mean",
        "actor/logprob_gap_max",
        "actor/logprob_gap_k3",
        "actor/logprob_gap_tokens",
        "actor_train/grad_norm",
    }
    assert expected <= set(answer.metrics)
    assert answer.metrics["actor/backward_steps"] == 2


async def test_a_repeated_step_is_answered_and_not_run_again(connect: Connect, batch: Batch) -> None:
    async with connect() as client:
        first = await client.train(await header(client), batch())
        again = await client.train(await header(client, step=0), batch())
        info = await client.get_info()

    assert again.repeated_answer
    assert (again.version, again.digest, again.metrics) == (first.version, first.digest, first.metrics)
    assert (info.version, info.digest) == (first.version, first.digest)


async def test_steps_that_do_not_fit_the_present_version_are_refused(connect: Connect, batch: Batch) -> None:
    async with connect() as client:
        await client.train(await header(client), batch())
        await client.train(await header(client), batch(seed=1))
        wrong = grpc.StatusCode.FAILED_PRECONDITION

        await refused(client.train(await header(client, step=1), batch(seed=2)), Reason.STEP_CONFLICT, wrong)
        await refused(client.train(await header(client, step=0), batch()), Reason.WRONG_VERSION, wrong)
        await refused(client.train(await header(client, step=7), batch()), Reason.WRONG_VERSION, wrong)
        foreign = await header(client, base_version={"lineage": "foreign", "step": 2})
        await refused(client.train(foreign, batch()), Reason.WRONG_VERSION, wrong)
        assert (await client.get_info()).version.step == 2


async def test_an_old_epoch_is_fenced(connect: Connect, batch: Batch) -> None:
    async with connect() as client:
        await client.train(await header(client, epoch=5), batch())

        await refused(client.train(await header(client, epoch=4), batch()), Reason.FENCED, grpc.StatusCode.ABORTED)
        export = learner_pb2.ExportRequest(fence={"run_id": "run", "epoch": 4}, name="late")
        await refused(client.export(export), Reason.FENCED, grpc.StatusCode.ABORTED)


async def test_a_batch_that_changed_on_the_way_is_refused(
    connect: Connect, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect() as client:
        monkeypatch.setattr("rollwire.client.learner.samples_digest", lambda samples: bytes(32))
        call = client.train(await header(client), batch())
        await refused(call, Reason.DIGEST_MISMATCH, grpc.StatusCode.INVALID_ARGUMENT)
        monkeypatch.undo()

        assert (await client.train(await header(client), batch())).version.step == 1


async def test_an_invalid_sample_is_refused_with_its_path_and_changes_nothing(connect: Connect, batch: Batch) -> None:
    samples = batch()
    samples[3].advantages[1] = float("nan")
    async with connect() as client:
        before = await client.get_info()
        error = await refused(
            client.train(await header(client), samples), Reason.INVALID_FIELD, grpc.StatusCode.INVALID_ARGUMENT
        )
        after = await client.get_info()

        assert list(error.fields) == ["samples[3].advantages[1]"]
        assert (before.version, before.digest) == (after.version, after.digest)
        assert (await client.train(await header(client), batch())).version.step == 1


async def test_an_invalid_header_is_refused_before_the_batch_arrives(connect: Connect, batch: Batch) -> None:
    async with connect() as client:
        call = client.train(await header(client, optimizer_steps=0), batch())
        error = await refused(call, Reason.INVALID_FIELD, grpc.StatusCode.INVALID_ARGUMENT)
        assert list(error.fields) == ["header.optimizer_steps"]


async def test_equal_learners_fed_equal_batches_have_equal_digests(connect: Connect, batch: Batch) -> None:
    digests = []
    for _ in range(2):
        async with connect(run={"deterministic": True}) as client:
            for seed in range(3):
                answer = await client.train(await header(client), batch(seed))
            digests.append(answer.digest)

    assert digests[0] == digests[1]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
async def test_both_precisions_train(connect: Connect, batch: Batch, precision: str) -> None:
    async with connect(learner={"precision": precision}, model={"dtype": "bfloat16"}) as client:
        before = await client.get_info()
        answer = await client.train(await header(client), batch())

    assert answer.digest != before.digest


class SlowTrainer:
    """Lets a test hold a step in the torch thread while other calls go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import threading

        self.began, self.go_on = threading.Event(), threading.Event()
        plain = Trainer.train

        def slow(trainer: Trainer, *arguments: Any) -> Any:
            self.began.set()
            assert self.go_on.wait(timeout=30)
            return plain(trainer, *arguments)

        monkeypatch.setattr(Trainer, "train", slow)


async def test_readers_and_health_are_served_while_a_step_runs(
    connect: Connect, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowTrainer(monkeypatch)
    async with connect() as client:
        step = asyncio.create_task(client.train(await header(client), batch()))
        await asyncio.to_thread(slow.began.wait, 30)

        assert await client.is_ready()
        assert (await client.get_info()).version.step == 0
        async with WeightsClient(client.target) as source:
            parts = [part async for part in source.fetch_weights(weights_pb2.FetchWeightsRequest())]
        assert weights_pb2.FetchWeightsResponse.FromString(parts[-1]).HasField("commit")
        busy = await refused(
            client.train(await header(client), batch()), Reason.STEP_IN_PROGRESS, grpc.StatusCode.ABORTED
        )
        assert busy.retry_after_s is not None
        slow.go_on.set()
        assert (await step).version.step == 1


async def test_a_step_whose_caller_went_away_is_completed_once(
    connect: Connect, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowTrainer(monkeypatch)
    async with connect() as client:
        step = asyncio.create_task(client.train(await header(client), batch()))
        await asyncio.to_thread(slow.began.wait, 30)
        step.cancel()
        slow.go_on.set()
        async with asyncio.timeout(30):
            while (await client.get_info()).version.step == 0:
                await asyncio.sleep(0.02)

        again = await client.train(await header(client, step=0), batch())
        assert again.repeated_answer and again.version.step == 1


async def test_a_step_that_fails_before_any_update_changes_nothing(
    connect: Connect, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect() as client:
        before = await client.get_info()
        with monkeypatch.context() as patch:
            patch.setattr("rollwire.learner.trainer.train_step", _raises)
            await refused(client.train(await header(client), batch()), Reason.INTERNAL, grpc.StatusCode.INTERNAL)
        after = await client.get_info()

        assert (before.version, before.digest) == (after.version, after.digest)
        assert (await client.train(await header(client), batch())).version.step == 1


async def test_a_device_without_enough_memory_says_what_to_do(
    connect: Connect, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nA page of advice")

    async with connect(learner={"micro_batch_tokens": 4321}) as client:
        calls: dict[str, Any] = {
            "train_step": lambda head: client.train(head, batch()),
            "score": lambda head: anext(aiter(client.score(batch(), 1.0))),
        }
        for name, call in calls.items():
            head = await header(client)
            with monkeypatch.context() as patch:
                patch.setattr(f"rollwire.learner.trainer.{name}", full)
                error = await refused(call(head), Reason.DEVICE_MEMORY_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert "(CUDA out of memory. Tried to allocate 2 GiB.); lower learner.micro_batch_tokens (now 4321)" in str(
                error
            )
        assert (await client.train(await header(client), batch())).version.step == 1


async def test_a_step_that_fails_half_way_begins_another_lineage(
    connect: Connect, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3: weights between two versions must never pass for either."""
    async with connect() as client:
        before = await client.get_info()
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "publish", _fails_at(Trainer.publish, step=1))
            await refused(client.train(await header(client), batch()), Reason.INTERNAL, grpc.StatusCode.INTERNAL)
        after = await client.get_info()

        assert after.version.lineage != before.version.lineage
        assert after.version.step == 0
        assert after.digest != before.digest
        old = await header(client, base_version=before.version)
        await refused(client.train(old, batch()), Reason.WRONG_VERSION, grpc.StatusCode.FAILED_PRECONDITION)
        assert (await client.train(await header(client), batch())).version.step == 1


async def test_a_step_that_fails_after_a_vetoed_part_begins_another_lineage_too(
    connect: Connect, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are as before, but the schedule and the loss scale have moved on: the step would not be the same."""

    def fails(policy: Any, optimizer: Any, *arguments: Any) -> Any:
        next(iter(policy.model.parameters())).grad = torch.full_like(next(iter(policy.model.parameters())), torch.inf)
        assert not optimizer.step().applied
        raise RuntimeError("out of luck")

    async with connect() as client:
        before = await client.get_info()
        with monkeypatch.context() as patch:
            patch.setattr("rollwire.learner.trainer.train_step", fails)
            await refused(client.train(await header(client), batch()), Reason.INTERNAL, grpc.StatusCode.INTERNAL)
        after = await client.get_info()
        assert after.version.lineage != before.version.lineage
        assert after.digest == before.digest


async def test_a_step_that_fails_within_the_optimizer_begins_another_lineage_too(
    connect: Connect, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as for want of memory for the moments of some parameters, after the others were changed."""
    plain = torch.optim.AdamW.step

    def half(adamw: torch.optim.AdamW) -> None:
        groups = adamw.param_groups
        adamw.param_groups = groups[:1]
        plain(adamw)
        adamw.param_groups = groups
        raise torch.OutOfMemoryError("CUDA out of memory")

    async with connect() as client:
        before = await client.get_info()
        with monkeypatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", half)
            await refused(
                client.train(await header(client), batch()),
                Reason.DEVICE_MEMORY_EXHAUSTED,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
        after = await client.get_info()
        assert after.version.lineage != before.version.lineage
        assert after.digest != before.digest
        assert (await client.train(await header(client), batch())).version.step == 1


async def test_a_learner_that_cannot_name_its_weights_ends(
    connect: Connect, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3: without a version nothing may be trained, scored or saved any more; it must not wait for ever either."""

    def full(trainer: Trainer, version: weights_pb2.WeightVersion) -> Any:
        raise MemoryError("no room")

    async with connect() as client:
        monkeypatch.setattr(Trainer, "publish", full)
        cause = "rank 0 of the learner failed: MemoryError: no room; the learner ends, start it again"
        await refused(client.train(await header(client), batch()), Reason.INTERNAL, grpc.StatusCode.INTERNAL)
        async with asyncio.timeout(30):
            while await client.is_ready():
                await asyncio.sleep(0.02)
        for call in (
            client.train(await header(client), batch()),
            client.save_checkpoint(learner_pb2.SaveCheckpointRequest(fence={"run_id": "run", "epoch": 1}, name="a")),
            anext(aiter(client.score(batch(), 1.0))),
        ):
            error = await refused(call, Reason.RANK_FAILED, grpc.StatusCode.INTERNAL)
            assert error.message == cause


async def test_nothing_is_scored_between_a_failed_step_and_the_new_lineage(
    connect: Connect, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I3: a score that waits behind the step must not be told as one of the version before it."""
    queued = asyncio.Event()
    plain = TorchThread.run

    async def run(thread: TorchThread, function: Callable[..., Any], *arguments: Any) -> Any:
        if function.__name__ == "_score":
            asyncio.get_running_loop().call_soon(queued.set)
        return await plain(thread, function, *arguments)

    slow = SlowTrainer(monkeypatch)
    monkeypatch.setattr(TorchThread, "run", run)
    monkeypatch.setattr(Trainer, "publish", _fails_at(Trainer.publish, step=1))
    async with connect() as client:
        before = await client.get_info()
        step = asyncio.create_task(client.train(await header(client), batch()))
        await asyncio.to_thread(slow.began.wait, 30)
        score = asyncio.create_task(anext(aiter(client.score(batch(), 1.0))))
        await asyncio.wait_for(queued.wait(), 30)
        slow.go_on.set()
        await refused(step, Reason.INTERNAL, grpc.StatusCode.INTERNAL)
        error = await refused(score, Reason.NO_WEIGHTS, grpc.StatusCode.UNAVAILABLE)
        assert error.retry_after_s is not None
        async with asyncio.timeout(30):
            while (await client.get_info()).version == before.version:
                await asyncio.sleep(0.02)
        scored = await anext(aiter(client.score(batch(), 1.0)))
        assert scored.version == (await client.get_info()).version


def _raises(*arguments: Any) -> Any:
    raise RuntimeError("out of luck")


def _fails_at(plain: Callable[..., Any], step: int) -> Callable[..., Any]:
    def publish(trainer: Trainer, version: weights_pb2.WeightVersion) -> Any:
        if version.step == step:
            raise RuntimeError("out of luck")
        return plain(trainer, version)

    return publish


async def test_closing_abandons_a_step_in_progress(
    connect: Connect, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowTrainer(monkeypatch)
    closed: list[training.Training] = []
    plain = training.Training.close

    async def close(self: training.Training) -> None:
        asyncio.get_running_loop().call_later(0.05, slow.go_on.set)  # after `plain` has asked the trainer to stop
        await plain(self)
        closed.append(self)

    monkeypatch.setattr(training.Training, "close", close)
    async with connect() as client:
        step = asyncio.create_task(client.train(await header(client), batch()))
        await asyncio.to_thread(slow.began.wait, 30)
        # Leaving the context closes the client's channel and then the server.

    with pytest.raises((RollwireError, asyncio.CancelledError)):
        await step
    assert [training.calls.version.step for training in closed] == [0]
