"""A learner with adapters over gRPC: description, updates, export, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from rollwire.client.learner import LearnerClient
from rollwire.v1 import learner_pb2, trajectory_pb2

from .conftest import VOCABULARY, Connect

Batch = Callable[..., list[learner_pb2.TrainSample]]
FENCE = trajectory_pb2.Fence(run_id="run", epoch=1)
LORA = {"lora": {"rank": 4, "alpha": 8}}


async def train(client: LearnerClient, samples: list[learner_pb2.TrainSample]) -> bytes:
    """Runs the next step and returns the digest of its weights."""
    version = (await client.get_info()).version
    request = learner_pb2.TrainHeader(base_version=version, optimizer_steps=2, fence=FENCE)
    request.loss.clip_low = request.loss.clip_high = 0.2
    return (await client.train(request, samples)).digest


async def test_few_parameters_are_trainable_and_a_step_changes_the_published_weights(
    connect: Connect, batch: Batch
) -> None:
    async with connect(learner=LORA) as client:
        before = await client.get_info()
        digest = await train(client, batch())

        assert 0 < before.trainable_parameters < before.parameters
        assert digest != before.digest


async def test_without_adapters_all_parameters_are_trainable(connect: Connect) -> None:
    async with connect() as client:
        info = await client.get_info()
        assert info.trainable_parameters == info.parameters


async def test_an_export_is_a_plain_model_that_scores_as_the_learner_does(connect: Connect, batch: Batch) -> None:
    async with connect(learner=LORA) as client:
        await train(client, batch())
        answer = await client.export(learner_pb2.ExportRequest(fence=FENCE, name="merged"))
        samples = batch(seed=7)
        scores = [score async for response in client.score(samples, 1.0) for score in response.scores]

    model, report = transformers.AutoModelForCausalLM.from_pretrained(answer.path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert not any("lora" in name for file in Path(answer.path).glob("*.safetensors") for name in load_file(file))
    for sample, score in zip(samples, scores, strict=True):
        ids = torch.tensor([list(sample.token_ids)])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1, :VOCABULARY].log_softmax(-1)
        expected = logprobs.gather(1, ids[0, 1:, None]).squeeze(1).numpy()
        mask = np.array(sample.loss_mask[1:])
        np.testing.assert_allclose(np.array(score.logprobs[1:])[mask], expected[mask], atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_training_goes_on_from_a_checkpoint_bit_for_bit(connect: Connect, batch: Batch, dtype: str) -> None:
    async with connect(learner=LORA, model={"dtype": dtype}) as client:
        await train(client, batch(0))
        saved = await client.save_checkpoint(learner_pb2.SaveCheckpointRequest(fence=FENCE, name="half"))
        wanted = [await train(client, batch(1)), await train(client, batch(2))]

    names = {name for file in Path(saved.path).glob("*.safetensors") for name in load_file(file)}
    adapters = {name for name in names if ".lora_" in name}
    assert any(name.startswith("policy.") for name in adapters)
    assert {name for name in names if name.startswith("policy_optimizer.")} == {
        name for name in adapters if name.startswith("policy_optimizer.")
    }

    async with connect(learner=LORA, model={"dtype": dtype}) as client:
        await client.load_checkpoint(learner_pb2.LoadCheckpointRequest(fence=FENCE, name="half"))
        assert [await train(client, batch(1)), await train(client, batch(2))] == wanted
