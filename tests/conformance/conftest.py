"""Every test here runs unchanged for every engine that the environment has: `make test` has transformers alone, the
environment of `make test-vllm` has both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import engine_kit as kit
import pytest
import pytest_asyncio
from engine_pool import EnginePool, available_engines
from rollout_bench import Bench, rollout_bench

from rollwire.rollout.engine import Engine
from rollwire.serving.model_tensors import SERVING_TYPES
from rollwire.v1 import weights_pb2


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine_name" in metafunc.fixturenames:
        names = available_engines(metafunc.config.getoption("--device"))
        metafunc.parametrize("engine_name", names, scope="session")


@dataclass
class Subject:
    """An engine under test and the model whose weights it holds.

    Attributes:
        engine: The engine.
        model: In float32 on the CPU, changed by the test as a learner changes its own.
        dtype: `model.dtype`, the type that weights travel and are computed in.
        step: Step of the version that the engine holds.
    """

    engine: Engine
    model: Any
    dtype: str = "float32"
    step: int = 0

    @property
    def bound(self) -> float:
        """Largest gap allowed between log-probabilities."""
        return kit.LOGPROB_BOUNDS[self.engine.description.device, self.dtype]

    @property
    def version(self) -> weights_pb2.WeightVersion:
        """Version that the engine holds."""
        return kit.version(self.step)

    async def load(self) -> bytes:
        """Loads the model's weights as the next version; returns the engine's digest."""
        self.step += 1
        return await self.engine.load_weights(
            self.version, kit.host_tensors(self.model, dtype=SERVING_TYPES[self.dtype])
        )


@pytest.fixture
def model_name() -> str:
    """Model of `subject`; tests override it by parametrising it."""
    return "qwen2_tied"


@pytest.fixture
def dtype() -> str:
    """Type of `subject`; tests override it by parametrising it."""
    return "float32"


@pytest_asyncio.fixture(loop_scope="session")
async def subject(engine_pool: EnginePool, engine_name: str, model_name: str, dtype: str) -> AsyncIterator[Subject]:
    """An engine that holds weights it was not started with."""
    found = Subject(await engine_pool.get(engine_name, model_name, dtype), kit.make_model(model_name, seed=11), dtype)
    await found.load()
    yield found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def benches(engine_pool: EnginePool) -> AsyncIterator[dict[str, Bench]]:
    """A rollout server for each engine, by its name."""
    async with AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(rollout_bench(engine_pool, name))
            for name in available_engines(engine_pool.device)
        }


@pytest_asyncio.fixture(loop_scope="session")
async def bench(benches: dict[str, Bench], engine_name: str) -> Bench:
    """The rollout server of one engine, with the weights that the policy ships with."""
    await benches[engine_name].reset()
    return benches[engine_name]
