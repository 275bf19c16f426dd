"""Tests that need vLLM; run in an environment that has it (`make test-vllm`), otherwise not collected.

What holds for every engine is in `tests/conformance`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from engine_pool import EnginePool

    from rollwire.rollout.engines.vllm_engine import VllmEngine

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def kit() -> Any:
    """What tests of engines share."""
    import engine_kit

    return engine_kit


@pytest.fixture(scope="session")
def model_directory(engine_pool: EnginePool) -> Callable[[str], Path]:
    """Saves a model once and returns its directory."""
    return engine_pool.model_directory


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_engine(engine_pool: EnginePool) -> AsyncIterator[VllmEngine]:
    """One running engine for all tests that leave it running; starting one takes seconds."""
    yield await engine_pool.get("vllm", "qwen2_tied")
