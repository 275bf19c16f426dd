"""Starts the engine that is configured, together with what else depends on which one it is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Literal

from rollwire.rollout.engine import Engine
from rollwire.rollout.engines.installed import vllm_for
from rollwire.rollout.host_file import shared_memory
from rollwire.rpc.memory_file import memory_file
from rollwire.rpc.weight_buffers import HostBuffers
from rollwire.serving.accelerator import Accelerator, prepare, select_device
from rollwire.serving.config.models import RunConfig
from rollwire.serving.logs import get_logger
from rollwire.serving.model_files import load_model, model_source
from rollwire.serving.model_tensors import SERVING_TYPES

_log = get_logger(__name__)


@dataclass(frozen=True)
class StartedEngine:
    """An engine that is ready for weights.

    Attributes:
        engine: The engine.
        buffers: Host memory for received weights, of the kind that the engine takes without a copy.
        end_token_ids: Tokens that end a text according to the model's generation settings.
    """

    engine: Engine
    buffers: HostBuffers
    end_token_ids: frozenset[int]


async def start_engine(config: RunConfig) -> StartedEngine:
    """Starts `rollout.engine`.

    Raises:
        ServeError: The model, the device or the engine cannot be used.
    """
    return await (_start_vllm(config) if choose_engine(config) == "vllm" else _start_transformers(config))


def choose_engine(config: RunConfig) -> Literal["transformers", "vllm"]:
    """Returns the engine that `rollout.engine` means on this host, and logs what decided when it is `auto`.

    Raises:
        ServeError: The device is not there.
    """
    if config.rollout.engine != "auto":
        return config.rollout.engine
    device = select_device(config.device).type
    found = vllm_for(device)
    chosen: Literal["transformers", "vllm"] = "transformers" if found is None else "vllm"
    _log.info("engine", setting="auto", engine=chosen, device=device, vllm=found or "none for this device")
    return chosen


async def _start_transformers(config: RunConfig) -> StartedEngine:
    from rollwire.rollout.engines.transformers_engine import TransformersEngine

    accelerator, model = await asyncio.to_thread(_load, config)
    engine = TransformersEngine(
        model,
        accelerator,
        max_sequence_tokens=config.rollout.max_episode_tokens,
        max_concurrent_sequences=config.rollout.max_concurrent_sequences,
    )
    return StartedEngine(engine, HostBuffers(memory_file), _end_token_ids(model.generation_config))


async def _start_vllm(config: RunConfig) -> StartedEngine:
    from rollwire.rollout.engines.vllm_start import start_vllm_engine

    settings = await asyncio.to_thread(_generation_settings, model_source(config.model))
    engine = await start_vllm_engine(
        config.model,
        device=config.device,
        max_sequence_tokens=config.rollout.max_episode_tokens,
        max_concurrent_sequences=config.rollout.max_concurrent_sequences,
        torch_threads=config.rollout.torch_threads,
        deterministic=config.run.deterministic,
        options=config.rollout.vllm,
    )
    return StartedEngine(engine, HostBuffers(shared_memory), _end_token_ids(settings))


def _load(config: RunConfig) -> tuple[Accelerator, Any]:
    accelerator = prepare(
        device=config.device,
        attention=config.model.attention,
        torch_threads=config.rollout.torch_threads,
        deterministic=config.run.deterministic,
    )
    dtype = SERVING_TYPES[config.model.dtype]
    return accelerator, load_model(config.model, dtype, accelerator.device, accelerator.attention)


def _generation_settings(source: str) -> Any:
    """Returns the model's `GenerationConfig`, as loading the model would give it."""
    from transformers import AutoConfig, GenerationConfig

    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:  # there is no generation_config.json
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(source))


def _end_token_ids(settings: Any) -> frozenset[int]:
    configured = getattr(settings, "eos_token_id", None)
    found = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in found if isinstance(token, int))
