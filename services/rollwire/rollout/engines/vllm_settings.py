"""Everything about vLLM that depends on the device: environment variables and engine arguments. Pure but for `apply`.

What was chosen is logged in one line when it is applied. Variables that the user has set are left alone, except those
that are refused because they open the engine to whoever reaches it or make updates impossible.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rollwire.rpc.limits import MIB
from rollwire.serving.accelerator import NPU_ENVIRONMENT
from rollwire.serving.config.sections import VllmSection
from rollwire.serving.logs import get_logger
from rollwire.serving.server import ServeError

_log = get_logger(__name__)
OWNER_VARIABLE: Final = "ROLLWIRE_ENGINE_OWNER_PID"
"""Variable with the id of the process whose end ends vLLM's."""
WORKER_CLASS: Final = "rollwire.rollout.engines.vllm_worker.RolloutWorker"
LOGPROBS_MODE: Final = "processed_logprobs"
"""Log-probabilities of the distribution that was sampled from: the behaviour policy."""
OLDEST_VERSION: Final = (0, 23)
NEWEST_VERSION: Final = (0, 32)
_REFUSED: Final = {
    "VLLM_SERVER_DEV_MODE": "offers vLLM's development endpoints",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "lets messages to the engine carry pickled code",
}
_REFUSED_ON_NPU: Final = {
    "VLLM_ASCEND_ENABLE_NZ": "keeps weights in the NZ format, which cannot be updated",
    "VLLM_ASCEND_ENABLE_FUSED_MC2": "keeps the weights of experts in the NZ format, which cannot be updated",
    "DYNAMIC_EPLB": "moves experts between devices behind the back of weight updates",
}
# The platform, and what patches vLLM for it in every process; a profiler's plugin is not needed.
_NPU_PLUGINS: Final = ("ascend", "ascend_kv_connector", "ascend_model", "ascend_model_loader")
_ALLOCATORS: Final = {
    "cuda": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    "npu": ("PYTORCH_NPU_ALLOC_CONF",),
}
# What else decides how vLLM runs: logged, never set.
_SHOWN: Final = {
    "cpu": (),
    "cuda": ("CUDA_VISIBLE_DEVICES", "VLLM_PLUGINS", *_ALLOCATORS["cuda"]),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_HOME_PATH", "VLLM_PLUGINS", *_ALLOCATORS["npu"]),
}
_OFF: Final = ("", "0", "false", "False")
_CPU_BLOCK_TOKENS: Final = 32
# Larger passes have more work per call of a kernel; beyond this their activations leave the caches.
_CPU_BATCHED_TOKENS: Final = 2048
_CPU_KV_CACHE_LIMIT_MIB: Final = 4096
# An episode that waits for its environment is not being decoded, but its prefix should still be there afterwards.
_CPU_KV_CACHE_SEQUENCES: Final = 2


@dataclass(frozen=True)
class EngineRequest:
    """What is asked of an engine.

    Attributes:
        model: Directory or hub id of the model.
        dtype: `float32` or `bfloat16`.
        device: `cpu`, `cuda` or `npu`.
        max_sequence_tokens: Longest sequence.
        max_concurrent_sequences: Sequences decoded together.
        torch_threads: Threads of one operation on CPU; 0 leaves torch's choice.
        deterministic: Compute every sequence by itself, so that nothing else influences its floating-point results.
        kv_bytes_per_token: Keys and values of one token on one rank.
    """

    model: str
    dtype: str
    device: str
    max_sequence_tokens: int
    max_concurrent_sequences: int
    torch_threads: int
    deterministic: bool
    kv_bytes_per_token: int


@dataclass(frozen=True)
class VllmSettings:
    """Chosen settings: variables to set unless they are set, and keyword arguments of `AsyncEngineArgs`."""

    device: str
    environment: dict[str, str]
    arguments: dict[str, Any]


def check_environment(environment: Mapping[str, str], device: str, options: VllmSection) -> None:
    """Refuses variables that open the engine, or with which its weights or its memory cannot be managed.

    Raises:
        ServeError: One of them is set.
    """
    refused = _REFUSED | (_REFUSED_ON_NPU if device == "npu" else {})
    for name, effect in refused.items():
        if environment.get(name, "0") not in _OFF:
            raise ServeError(f"{name} is {environment[name]!r}, which {effect}; Rollwire does not need it, unset it")
    if device == "npu" and "VLLM_PLUGINS" in environment:
        allowed = environment["VLLM_PLUGINS"].split(",")
        missing = [name for name in _NPU_PLUGINS if name not in allowed]
        if missing:
            raise ServeError(
                f"VLLM_PLUGINS is {environment['VLLM_PLUGINS']!r}, which keeps vllm-ascend's {', '.join(missing)} out; "
                "unset it, or add them"
            )
    for name in _ALLOCATORS.get(device, ()) if options.sleep_mode else ():
        # torch reads True, vllm-ascend compares the text; other spellings of it do not exist.
        if "expandable_segments:true" in environment.get(name, "").replace(" ", "").lower():
            raise ServeError(
                f"{name} is {environment[name]!r}, but with rollout.vllm.sleep_mode=true the allocator cannot have "
                "expandable segments: take expandable_segments:True out of it, or set rollout.vllm.sleep_mode=false"
            )


def check_version(version: str) -> None:
    """Accepts the versions of vLLM that the engine was written for; a newer one is worth a warning.

    Raises:
        ServeError: The version is too old.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found is not None else NEWEST_VERSION
    if number < OLDEST_VERSION:
        raise ServeError(
            f"vllm {version} is too old; rollout.engine=vllm needs {_dotted(OLDEST_VERSION)} to "
            f"{_dotted(NEWEST_VERSION)}, install one of these"
        )
    if number > NEWEST_VERSION:
        _log.warning(
            "this vLLM is newer than those Rollwire was tested with", vllm=version, newest=_dotted(NEWEST_VERSION)
        )


def kv_bytes_per_token(config: Any, element_bytes: int, tensor_parallel_size: int) -> int:
    """Returns the size of one token's keys and values on one rank, if every layer keeps them.

    Args:
        config: Text configuration of the model, a `transformers.PretrainedConfig`.
        element_bytes: Size of one number.
        tensor_parallel_size: Ranks that share the heads.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(config.num_hidden_layers) * -(-int(heads) // tensor_parallel_size) * int(head_size) * element_bytes


def choose(request: EngineRequest, options: VllmSection) -> VllmSettings:
    """Returns the settings for a device."""
    batched = options.max_batched_tokens
    concurrent = 1 if request.deterministic else request.max_concurrent_sequences
    arguments: dict[str, Any] = {
        "model": request.model,
        "skip_tokenizer_init": True,
        "dtype": request.dtype,
        "seed": 0,
        # Version 0 arrives before anything is generated; reading the checkpoint would be work for nothing.
        "load_format": "dummy",
        "generation_config": "vllm",
        "logprobs_mode": LOGPROBS_MODE,
        "max_model_len": request.max_sequence_tokens,
        "max_num_seqs": concurrent,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enable_prefix_caching": not request.deterministic,
        "enforce_eager": options.enforce_eager,
        "disable_log_stats": True,
        "worker_extension_cls": WORKER_CLASS,
    }
    if options.kv_cache_mib > 0:
        arguments["kv_cache_memory_bytes"] = options.kv_cache_mib * MIB
    if batched > 0:
        arguments["max_num_batched_tokens"] = batched
    environment = {
        # A fork of a process that runs gRPC's threads can hang.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Deprecations inside vLLM.
        "PYTHONWARNINGS": "ignore",
    }
    if options.sleep_mode and request.device != "cpu":
        arguments["enable_sleep_mode"] = True
    _FOR_DEVICE[request.device](request, options, environment, arguments)
    return VllmSettings(request.device, environment, arguments)


def sleep_disabled(request: EngineRequest, options: VllmSection) -> str:
    """Returns why the engine cannot free its device, empty if it can; see `EngineDescription.sleep_disabled`."""
    if options.sleep_mode or request.device == "cpu":
        return ""
    return (
        "this rollout server cannot free its device: vllm was started without sleep mode; set "
        "rollout.vllm.sleep_mode=true and restart it"
    )


def apply(settings: VllmSettings) -> None:
    """Sets the variables that are not set, and logs the effective settings in one line; before vLLM is imported."""
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    for name, value in settings.environment.items():
        os.environ.setdefault(name, value)
    effective = {name: os.environ[name] for name in settings.environment}
    found = {name: os.environ.get(name, "unset") for name in _SHOWN[settings.device]}
    _log.info("vllm settings", environment=effective, found=found, arguments=settings.arguments)


def _for_cpu(
    request: EngineRequest, options: VllmSection, environment: dict[str, str], arguments: dict[str, Any]
) -> None:
    environment |= {
        # Binding to cores is for hosts that run nothing else.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The second model runner needs a Triton that compiles for CPUs; which one runs must not depend on whether there
        # is one.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # Sampling is compiled otherwise: a C++ build at the first request.
        "TORCH_COMPILE_DISABLE": "1",
    }
    if request.torch_threads > 0:
        environment["OMP_NUM_THREADS"] = str(request.torch_threads)
    if options.tensor_parallel_size == 1:
        # The worker lives in the engine's process: one process less to start and to talk to.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            str(rank % (os.cpu_count() or 1)) for rank in range(options.tensor_parallel_size)
        )
    # A captured graph would go on using packed weights of an older version.
    arguments["enforce_eager"] = True
    arguments["block_size"] = _CPU_BLOCK_TOKENS
    # The prompt of a seeded request must not be split over passes: vLLM then draws a token, discards it and turns the
    # request's generator back, which generators of the CPU cannot do; the engine dies. Without splitting, a pass must
    # have room for the longest prompt beside all sequences that are being decoded.
    longest = request.max_sequence_tokens + request.max_concurrent_sequences
    arguments["enable_chunked_prefill"] = False
    arguments["max_num_batched_tokens"] = max(options.max_batched_tokens or _CPU_BATCHED_TOKENS, longest)
    if options.kv_cache_mib == 0:
        block_bytes = _CPU_BLOCK_TOKENS * request.kv_bytes_per_token
        blocks = -(-request.max_sequence_tokens // _CPU_BLOCK_TOKENS)
        wanted = _CPU_KV_CACHE_SEQUENCES * arguments["max_num_seqs"] * blocks * block_bytes
        needed = blocks * block_bytes
        # One block is never handed out.
        arguments["kv_cache_memory_bytes"] = max(min(wanted, _CPU_KV_CACHE_LIMIT_MIB * MIB), needed) + block_bytes


def _for_cuda(
    request: EngineRequest, options: VllmSection, environment: dict[str, str], arguments: dict[str, Any]
) -> None:
    arguments["gpu_memory_utilization"] = options.gpu_memory_utilization


def _for_npu(
    request: EngineRequest, options: VllmSection, environment: dict[str, str], arguments: dict[str, Any]
) -> None:
    arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    environment |= {
        # Weights in the NZ format cannot be overwritten by tensors in the checkpoint's layout. The variable rather than
        # `additional_config`, because vllm-ascend 0.23 reads both.
        "VLLM_ASCEND_ENABLE_NZ": "0",
        # 2 cannot capture graphs.
        "TASK_QUEUE_ENABLE": "1",
        # The sampler whose mode of log-probabilities is set is the first model runner's; vllm-ascend 0.23 has no other.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    } | NPU_ENVIRONMENT


_FOR_DEVICE: Final[dict[str, Callable[[EngineRequest, VllmSection, dict[str, str], dict[str, Any]], None]]] = {
    "cpu": _for_cpu,
    "cuda": _for_cuda,
    "npu": _for_npu,
}


def _dotted(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"
