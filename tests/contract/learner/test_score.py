"""Score equals the forward pass of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import transformers

from rollwire.rpc.errors import RollwireError
from rollwire.v1 import learner_pb2


async def test_scores_are_those_of_the_plain_forward_pass(
    connect: Any, batch: Callable[..., Any], model_directory: Callable[..., Path]
) -> None:
    directory = model_directory()
    samples = batch()
    async with connect(model={"path": str(directory)}) as client:
        info = await client.get_info()
        responses = [response async for response in client.score(samples, 0.7)]

    scores = [score for response in responses for score in response.scores]
    assert [score.sample_id for score in scores] == [sample.sample_id for sample in samples]
    assert all(response.version == info.version for response in responses)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for sample, score in zip(samples, scores, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([list(sample.token_ids)])).logits[0]
        logp = torch.log_softmax(logits / 0.7, dim=-1)
        for position in range(len(sample.token_ids)):
            if position == 0 or not sample.loss_mask[position]:
                assert score.logprobs[position] == score.entropies[position] == 0
                continue
            row = logp[position - 1]
            assert score.logprobs[position] == pytest.approx(row[sample.token_ids[position]].item(), abs=1e-5)
            assert score.entropies[position] == pytest.approx(-(row.exp() * row).sum().item(), abs=1e-5)


async def test_advantages_and_logprobs_may_be_absent(connect: Any) -> None:
    sample = learner_pb2.TrainSample(sample_id="a", token_ids=[1, 2, 3], loss_mask=[False, True, False])
    async with connect() as client:
        (response,) = [response async for response in client.score([sample], 0)]

    assert response.scores[0].logprobs[1] < 0


async def test_an_invalid_sample_is_refused_with_its_path(connect: Any) -> None:
    sample = learner_pb2.TrainSample(sample_id="a", token_ids=[1, 61], loss_mask=[False, True])
    async with connect() as client:
        with pytest.raises(RollwireError) as caught:
            [response async for response in client.score([sample], 1.0)]

    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert list(caught.value.fields) == ["samples[0].token_ids[1]"]
