"""Makes a running `VllmEngine` from configuration; everything a user can get wrong becomes a one-line `ServeError`."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from rollwire.rollout.engine import EngineDescription, GenerationError
from rollwire.rollout.engines.expert_names import check_experts
from rollwire.rollout.engines.vllm_engine import VllmEngine
from rollwire.rollout.engines.vllm_names import checkpoint_names
from rollwire.rollout.engines.vllm_process import EngineOutput, one_line, start_vllm
from rollwire.rollout.engines.vllm_requests import LOWEST_TEMPERATURE
from rollwire.rollout.engines.vllm_settings import (
    EngineRequest,
    VllmSettings,
    check_environment,
    choose,
    kv_bytes_per_token,
    sleep_disabled,
)
from rollwire.rpc.errors import RollwireError
from rollwire.serving.accelerator import select_device
from rollwire.serving.config.sections import ModelSection, VllmSection
from rollwire.serving.logs import get_logger
from rollwire.serving.model_files import model_source
from rollwire.serving.model_tensors import SERVING_TYPES, WIRE_TYPES
from rollwire.serving.server import ServeError

_log = get_logger(__name__)


async def start_vllm_engine(
    section: ModelSection,
    *,
    device: str,
    max_sequence_tokens: int,
    max_concurrent_sequences: int,
    torch_threads: int = 1,
    deterministic: bool = False,
    options: VllmSection | None = None,
) -> VllmEngine:
    """Starts vLLM; the engine has random weights until the first `load_weights` and refuses to generate before.

    Args:
        section: Which model.
        device: `auto`, `cpu`, `cuda` or `npu`.
        max_sequence_tokens: Longest sequence.
        max_concurrent_sequences: Sequences decoded together.
        torch_threads: Threads of one operation on CPU; 0 leaves torch's choice.
        deterministic: Compute every sequence by itself.
        options: What only vLLM has; default `VllmSection()`.

    Raises:
        ServeError: The environment, the model or vLLM itself does not allow it.
    """
    options = options or VllmSection()
    device = select_device(device).type
    check_environment(os.environ, device, options)
    dtype = SERVING_TYPES[section.dtype]
    source = model_source(section)
    config = _load_config(section, source)
    text_config = config.get_text_config()
    _check_positions(text_config, max_sequence_tokens)
    names = await asyncio.to_thread(checkpoint_names, config, dtype)
    check_experts(config.model_type, names.layouts.items())
    request = EngineRequest(
        model=source,
        dtype=section.dtype,
        device=device,
        max_sequence_tokens=max_sequence_tokens,
        max_concurrent_sequences=max_concurrent_sequences,
        torch_threads=torch_threads,
        deterministic=deterministic,
        kv_bytes_per_token=kv_bytes_per_token(text_config, dtype.itemsize, options.tensor_parallel_size),
    )
    settings = choose(request, options)
    output = EngineOutput()
    vllm, version = await asyncio.to_thread(start_vllm, settings, request.device, output)
    description = _describe(request, options, settings, names.architecture, text_config.vocab_size)
    engine = VllmEngine(vllm, description, names, output)
    _log.info("vllm ready", vllm=version, logprobs_mode=await _prepare(engine, output))
    return engine


def _describe(
    request: EngineRequest, options: VllmSection, settings: VllmSettings, architecture: str, vocabulary_size: int
) -> EngineDescription:
    return EngineDescription(
        name="vllm",
        architecture=architecture,
        device=request.device,
        dtype=WIRE_TYPES[SERVING_TYPES[request.dtype]],
        vocabulary_size=vocabulary_size,
        max_sequence_tokens=request.max_sequence_tokens,
        max_concurrent_sequences=settings.arguments["max_num_seqs"],
        sleep_disabled=sleep_disabled(request, options),
        lowest_temperature=LOWEST_TEMPERATURE,
    )


async def _prepare(engine: VllmEngine, output: EngineOutput) -> str:
    """Makes the engine ready for weights and returns its mode of log-probabilities; closes it when that fails."""
    try:
        return await engine.prepare()
    except (GenerationError, RollwireError) as error:
        await engine.close()
        cause = output.failure() or (error.message if isinstance(error, RollwireError) else str(error))
        raise ServeError(f"the vllm engine cannot start: {cause}") from error


def _load_config(section: ModelSection, source: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers raises a dozen types for a broken directory
        raise ServeError(
            f"model.path is {section.path!r}: its config.json cannot be used ({one_line(error)}); give a directory in "
            "Hugging Face layout"
        ) from error


def _check_positions(config: Any, max_sequence_tokens: int) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < max_sequence_tokens:
        raise ServeError(
            f"rollout.max_episode_tokens is {max_sequence_tokens}, but the model has only {positions} positions; "
            f"set rollout.max_episode_tokens to at most {positions}"
        )
