"""A real learner server on a loopback port, a client of it, and batches that it takes."""

from __future__ import annotations

import os
import resource
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollwire.client.learner import LearnerClient
from rollwire.learner.service import LearnerServer
from rollwire.serving.config.models import RunConfig
from rollwire.serving.server import Binding, serving
from rollwire.v1 import learner_pb2

VOCABULARY = 61

Connect = Callable[..., AbstractAsyncContextManager[LearnerClient]]


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """Makes the kernel refuse larger files, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def umask_027() -> Iterator[None]:
    """Makes new files unreadable for others."""
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns a maker of model directories without a tokenizer."""

    def make(**changes: Any) -> Path:
        directory = tmp_path_factory.mktemp("model")
        torch.manual_seed(0)
        config = transformers.Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=1,
            **changes,
        )
        transformers.Qwen2ForCausalLM(config).save_pretrained(directory)
        return directory

    return make


@pytest.fixture
def connect(model_directory: Callable[..., Path], tmp_path: Path) -> Connect:
    """Returns a context manager that serves a learner and connects to it; arguments are configuration sections."""

    @asynccontextmanager
    async def run(**sections: Any) -> AsyncIterator[LearnerClient]:
        model = {"path": str(model_directory()), **sections.pop("model", {})}
        settings = {"optimizer": {"learning_rate": 1e-2}, **sections.pop("learner", {})}
        output = {"output_dir": str(tmp_path / "output"), **sections.pop("run", {})}
        config = RunConfig.model_validate(
            {"model": model, "learner": settings, "run": output, "device": "cpu", **sections}
        )
        async with (
            serving(LearnerServer(config), Binding(), grace_s=5) as server,
            LearnerClient(server.address) as client,
        ):
            yield client

    return run


@pytest.fixture
def batch() -> Callable[..., list[learner_pb2.TrainSample]]:
    """Returns a maker of random samples."""

    def make(seed: int = 0, count: int = 6) -> list[learner_pb2.TrainSample]:
        random = np.random.default_rng(seed)
        samples = []
        for number in range(count):
            length = int(random.integers(4, 30))
            loss_mask = random.random(length) < 0.5
            loss_mask[1] = True
            samples.append(
                learner_pb2.TrainSample(
                    sample_id=f"sample-{number}",
                    token_ids=random.integers(0, VOCABULARY, length).tolist(),
                    loss_mask=loss_mask.tolist(),
                    advantages=random.normal(size=length).tolist(),
                    logprobs=(-4 - random.random(length)).tolist(),
                    comparable_logprobs=number % 2 == 0,
                )
            )
        return samples

    return make
