"""Critic and reference over the wire: what GetInfo offers, Score of each, and training with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import transformers

from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import learner_pb2

Batch = Callable[..., list[learner_pb2.TrainSample]]
Connect = Callable[..., Any]
POLICY, REFERENCE, CRITIC = 1, 2, 3

GAE = {"algorithm": {"advantage": "gae"}}
KL = {"algorithm": {"kl": {"coefficient": 0.1}}}


async def header(client: Any, loss: dict[str, Any] | None = None, **changes: Any) -> learner_pb2.TrainHeader:
    fields: dict[str, Any] = {
        "fence": {"run_id": "run", "epoch": 1},
        "base_version": (await client.get_info()).version,
        "loss": {"clip_low": 0.2, "clip_high": 0.2, **(loss or {})},
        "optimizer_steps": 2,
        "shuffle_seed": 3,
    }
    return learner_pb2.TrainHeader(**{**fields, **changes})


async def scores(client: Any, samples: list[learner_pb2.TrainSample], model: int) -> list[learner_pb2.SampleScore]:
    return [score async for response in client.score(samples, 1.0, model=model) for score in response.scores]


def logprobs(found: list[learner_pb2.SampleScore]) -> list[list[float]]:
    return [list(score.logprobs) for score in found]


def with_field(samples: list[learner_pb2.TrainSample], name: str, value: float) -> list[learner_pb2.TrainSample]:
    for sample in samples:
        getattr(sample, name).extend([value] * len(sample.token_ids))
    return samples


@pytest.mark.parametrize(
    ("sections", "models"),
    [({}, [POLICY]), (KL, [POLICY, REFERENCE]), (GAE, [POLICY, CRITIC])],
    ids=["neither", "reference", "critic"],
)
async def test_only_what_the_algorithm_needs_is_there(
    sections: dict[str, Any], models: list[int], connect: Connect, batch: Batch
) -> None:
    async with connect(**sections) as client:
        assert list((await client.get_info()).models) == models
        for missing in {POLICY, REFERENCE, CRITIC, 9} - set(models):
            with pytest.raises(RollwireError) as caught:
                await scores(client, batch(), missing)
            assert (caught.value.code, list(caught.value.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, ["model"])


async def test_the_reference_stays_while_the_policy_is_trained(connect: Connect, batch: Batch) -> None:
    async with connect(**KL) as client:
        before = await scores(client, batch(), POLICY)
        assert logprobs(await scores(client, batch(), REFERENCE)) == logprobs(before)
        samples = batch()
        for sample, score in zip(samples, before, strict=True):
            sample.reference_logprobs.extend(score.logprobs)
        answer = await client.train(await header(client, {"kl_coefficient": 0.1}), samples)

        assert logprobs(await scores(client, batch(), REFERENCE)) == logprobs(before)
        assert logprobs(await scores(client, batch(), POLICY)) != logprobs(before)
    assert answer.metrics["actor/kl_loss"] > 0  # of the second optimizer step; in the first one the two are equal


async def test_another_reference_can_be_given(
    connect: Connect, batch: Batch, model_directory: Callable[..., Path]
) -> None:
    directory = model_directory(tie_word_embeddings=True)
    reference = {"learner": {"reference": {"path": str(directory)}}}
    async with connect(**KL, **reference) as client:
        found = await scores(client, batch(), REFERENCE)

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for sample, score in zip(batch(), found, strict=True):
        with torch.no_grad():
            logp = model(input_ids=torch.tensor([list(sample.token_ids)])).logits[0].log_softmax(-1)
        for position in np.flatnonzero(sample.loss_mask)[1:]:
            assert score.logprobs[position] == pytest.approx(
                logp[position - 1, sample.token_ids[position]].item(), abs=1e-5
            )


async def test_the_critic_learns_while_the_policy_is_frozen(connect: Connect, batch: Batch) -> None:
    critic = {"learner": {"critic": {"optimizer": {"learning_rate": 1e-2}}}}
    async with connect(**GAE, **critic) as client:
        first = await client.get_info()
        assert not any(any(score.values) for score in await scores(client, batch(), CRITIC))
        for _ in range(20):
            samples = with_field(batch(), "returns", 1.5)
            answer = await client.train(await header(client, train_critic=True, freeze_policy=True), samples)
        last = await client.get_info()
        found = await scores(client, batch(), CRITIC)

    assert (first.version.step, last.version.step) == (0, 20)
    assert first.digest == last.digest == answer.digest
    assert "actor/pg_loss" not in answer.metrics
    assert {"critic/loss", "critic/vpred", "critic/error", "critic/lr", "critic/grad_norm"} <= set(answer.metrics)
    values = [
        value
        for sample, score in zip(batch(), found, strict=True)
        for value, trained in list(zip(score.values, sample.loss_mask, strict=True))[1:]
        if trained
    ]
    assert np.mean(values) == pytest.approx(1.5, abs=0.3)
    assert not any(list(score.logprobs) for score in found)


async def test_policy_and_critic_are_trained_together(connect: Connect, batch: Batch) -> None:
    async with connect(**GAE) as client:
        before = await client.get_info()
        samples = with_field(with_field(batch(), "returns", 1.0), "values", 0.0)
        answer = await client.train(await header(client, {"value_clip": 0.2}, train_critic=True), samples)

    assert answer.digest != before.digest
    assert {"actor/pg_loss", "critic/loss", "critic/clipfrac", "critic/skipped_steps"} <= set(answer.metrics)


@pytest.mark.parametrize(
    ("sections", "loss", "changes", "path"),
    [
        ({}, {}, {"train_critic": True}, "header.train_critic"),
        (GAE, {}, {"train_critic": True}, "samples[0].returns"),
        (GAE, {"value_clip": 0.2}, {"train_critic": True}, "samples[0].returns"),
        (GAE, {"value_clip": 0.2}, {}, "header.loss.value_clip"),
        (GAE, {}, {"freeze_policy": True}, "header.freeze_policy"),
        ({}, {"kl_coefficient": 0.1}, {}, "samples[0].reference_logprobs"),
    ],
)
async def test_what_is_missing_is_named(
    sections: dict[str, Any], loss: dict[str, Any], changes: dict[str, Any], path: str, connect: Connect, batch: Batch
) -> None:
    async with connect(**sections) as client:
        with pytest.raises(RollwireError) as caught:
            await client.train(await header(client, loss, **changes), batch())
        assert (await client.get_info()).version.step == 0

    assert caught.value.reason == Reason.INVALID_FIELD
    assert list(caught.value.fields) == [path]


@pytest.mark.parametrize("loss", ["gspo", "gspo_segment", "cispo", "topr", "topr_token", "policy_gradient"])
async def test_every_policy_loss_trains(loss: str, connect: Connect, batch: Batch) -> None:
    settings: dict[str, Any] = {"policy_loss": loss, "recompute_old_logprobs": True}
    if loss in ("topr", "topr_token", "policy_gradient"):
        settings |= {"clip_low": 0.0, "clip_high": 0.0}
    settings["importance_weight"] = {"level": learner_pb2.RATIO_LEVEL_SEQUENCE_MEAN, "upper_bound": 2.0}
    async with connect() as client:
        assert loss in (await client.get_info()).policy_losses
        before = await client.get_info()
        answer = await client.train(await header(client, settings), batch())

    assert answer.digest != before.digest
    assert {"actor/pg_loss", "actor/train_infer_kl", "actor/is_weight_ess"} <= set(answer.metrics)
