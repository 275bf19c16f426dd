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
from rollwire.client.weights import WeightsClient
from rollwire.policies import resolve
from rollwire.rpc.weight_delta import supported_encodings
from rollwire.rpc.weight_low_rank import LowRankBases
from rollwire.rpc.weight_stream import HeldWeights, WeightAssembler, receive_weights
from rollwire.serving.model_tensors import SERVING_TYPES, copy_all_in, held_digest, layouts
from rollwire.v1 import learner_pb2, trajectory_pb2, weights_pb2

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


async def follow(
    client: LearnerClient, model: torch.nn.Module, dtype: str, held: HeldWeights | None, bases: LowRankBases
) -> tuple[HeldWeights, int]:
    """Fetches the present version over the network as a rollout server does; returns it and the bytes that came."""
    version = (await client.get_info()).version
    request = weights_pb2.FetchWeightsRequest(
        version=version,
        have=held.version if held is not None else None,
        accepted_encodings=supported_encodings(),
        low_rank_bases=bases.digest,
    )
    found = layouts(model, SERVING_TYPES[dtype])
    assembler = WeightAssembler(found, version, base=held, low_rank_bases=bases)
    async with WeightsClient(client.target) as source:
        return await receive_weights(source.fetch_weights(request), assembler), assembler.received_bytes


@pytest.mark.parametrize(("dtype", "most"), [("float32", 0.35), ("bfloat16", 0.68)])
async def test_an_update_is_the_adapters_and_brings_the_merged_weights(
    connect: Connect, batch: Batch, dtype: str, most: float
) -> None:
    """The settings of frozenlake-lora.yaml; its matrices are so small that adapters are a large part of them."""
    rank, directory = 16, resolve("builtin:tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=SERVING_TYPES[dtype])
    linear = [module for module in model.model.layers.modules() if type(module) is torch.nn.Linear]
    adapter_bytes = sum(4 * rank * (module.in_features + module.out_features) for module in linear)
    learner = {"lora": {"rank": rank, "alpha": 32}, "optimizer": {"learning_rate": 2e-3}}
    async with connect(learner=learner, model={"path": "builtin:tiny", "dtype": dtype}) as client:
        bases = LowRankBases()
        held, whole_bytes = await follow(client, model, dtype, None, bases)
        for step in range(3):
            answer_digest = await train(client, batch(step))
            held, received_bytes = await follow(client, model, dtype, held, bases)
            late, late_bytes = await follow(client, model, dtype, None, LowRankBases())
            copy_all_in(model, held.tensors)
            assert held_digest(model, SERVING_TYPES[dtype]) == held.digest == late.digest == answer_digest
            # Where fewer bytes say what changed in a matrix, those come instead.
            assert 0.5 * adapter_bytes < received_bytes <= adapter_bytes
            assert received_bytes < most * whole_bytes == most * late_bytes
