"""The configurations that ship can be read, and say what their comments say."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollwire.rollout.engines.vllm_settings import EngineRequest, check_environment, choose
from rollwire.serving.config.loader import load_config

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
EXAMPLES = sorted(DEPLOY.rglob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_valid_configuration(path: Path) -> None:
    config = load_config(path)
    assert config.run.max_steps > 0 and config.environments


def test_the_example_for_ascend_uses_the_card_as_docs_say() -> None:
    config = load_config(DEPLOY / "ascend" / "frozenlake-qwen.yaml")
    assert (config.device, config.model.dtype, config.rollout.engine) == ("npu", "bfloat16", "vllm")
    check_environment({}, config.device, config.rollout.vllm)
    rollout = config.rollout
    request = EngineRequest(
        config.model.path,
        config.model.dtype,
        config.device,
        rollout.max_episode_tokens,
        rollout.max_concurrent_sequences,
        rollout.torch_threads,
        config.run.deterministic,
        1,
    )
    settings = choose(request, rollout.vllm)
    assert settings.environment["VLLM_ASCEND_ENABLE_NZ"] == "0" and settings.arguments["enforce_eager"] is True
