"""Options and engines that several groups of tests share. Nothing here loads torch before a test wants an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

# How long an example takes says something about the machine and what else it does, not about the code.
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", choices=("cpu", "cuda", "npu"), help="device of the engines in tests/conformance"
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine_pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    """Engines by name, model and type; each is started once."""
    from engine_pool import EnginePool

    pool = EnginePool(request.config.getoption("--device"), tmp_path_factory.mktemp("models"))
    yield pool
    await pool.close()
