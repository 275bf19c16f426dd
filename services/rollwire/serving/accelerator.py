"""Where torch computes and how: the one module that knows device types. Its choices are logged as effective values."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Final

import torch

from rollwire.serving.config.models import RunConfig
from rollwire.serving.logs import get_logger
from rollwire.serving.server import ServeError

_log = get_logger(__name__)
DEVICE_TYPES: Final = ("cpu", "cuda", "npu")
# What each device does best when `model.attention` is `auto`; None leaves the choice to transformers, which takes
# sdpa where the architecture has it and eager elsewhere.
_AUTO_ATTENTION: Final[dict[str, str | None]] = {"cpu": None, "cuda": None, "npu": None}
# Ascend computes float64 on the host, if at all.
_NO_FLOAT64: Final = ("npu",)
# Where torch's own AdamW has a fused kernel.
_FUSED_OPTIMIZER: Final = ("cpu", "cuda")
# Which collective backend torch.distributed takes for tensors on a device; host tensors always travel over gloo.
_COLLECTIVES: Final = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
NPU_ENVIRONMENT: Final = {"HCCL_NPU_SOCKET_PORT_RANGE": "auto", "HCCL_HOST_SOCKET_PORT_RANGE": "auto"}
"""Variables for every process that uses an NPU, unless they are set: rollout server and learner may share a card, and
HCCL's fixed ports would then collide."""
_PACKAGE: Final = {"cuda": "a CUDA build of torch", "npu": "torch-npu"}


@dataclass(frozen=True)
class Accelerator:
    """The effective settings of this process.

    Attributes:
        device: Device that holds the model.
        attention: Attention implementation to ask transformers for; None lets it choose.
        threads: Threads of one operation on the CPU.
        deterministic: True if only deterministic kernels run.
        wide: Widest floating-point type that the device computes quickly, for sums over a vocabulary.
        fused_optimizer: Whether torch's optimizers are asked for their fused kernel.
    """

    device: torch.device
    attention: str | None
    threads: int
    deterministic: bool
    wide: torch.dtype
    fused_optimizer: bool


def select_device(setting: str) -> torch.device:
    """Returns the device for a configured `device`.

    Args:
        setting: `auto` (an accelerator if there is one, else the CPU), `cpu`, `cuda` or `npu`.

    Raises:
        ServeError: The device is not there.
    """
    if setting == "npu":
        _import_torch_npu()
    available = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if setting == "auto":
        chosen = available if available is not None and available.type in DEVICE_TYPES else torch.device("cpu")
    elif setting == "cpu":
        chosen = torch.device("cpu")
    elif available is not None and available.type == setting:
        chosen = available
    else:
        found = available.type if available is not None else "cpu alone"
        raise ServeError(
            f"device is {setting!r}, but torch {torch.__version__} finds {found}; install "
            f"{_PACKAGE.get(setting, setting)} and check the driver, or set device=auto"
        )
    return chosen


def collective_backends(device: torch.device) -> str:
    """Returns the backends that `torch.distributed.init_process_group` is given for a device."""
    return _COLLECTIVES[device.type]


def _import_torch_npu() -> None:
    """Imports what makes NPUs known to torch; `import torch` has done so already unless it was told not to.

    Raises:
        ServeError: It is not installed, or does not find CANN.
    """
    try:
        importlib.import_module("torch_npu")
    except Exception as error:  # its libraries raise what the loader and CANN raise
        lines = str(error).splitlines()
        raise ServeError(
            f"device is 'npu', but torch_npu cannot be imported ({type(error).__name__}: {lines[0] if lines else ''}); "
            "install rollwire with the extra ascend and source CANN's set_env.sh, as docs/ascend.md says"
        ) from error


def prepare(
    *, device: str, attention: str = "auto", torch_threads: int = 1, deterministic: bool = False
) -> Accelerator:
    """Applies the settings to this process and logs the effective values.

    Args:
        device: As for `select_device`.
        attention: `auto` or an implementation that transformers knows.
        torch_threads: Threads of one operation on the CPU; 0 leaves torch's choice.
        deterministic: Refuse kernels whose result may differ between runs.

    Raises:
        ServeError: The device is not there.
    """
    chosen = select_device(device)
    if torch_threads > 0:
        torch.set_num_threads(torch_threads)
    if deterministic:
        # cuBLAS reads this once, before its first call.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    environment = _prepare_npu(chosen) if chosen.type == "npu" else {}
    effective = Accelerator(
        device=chosen,
        attention=_AUTO_ATTENTION[chosen.type] if attention == "auto" else attention,
        threads=torch.get_num_threads(),
        deterministic=deterministic,
        wide=torch.float32 if chosen.type in _NO_FLOAT64 else torch.float64,
        fused_optimizer=chosen.type in _FUSED_OPTIMIZER,
    )
    _log.info(
        "accelerator",
        device=str(chosen),
        device_name=_device_name(chosen),
        attention=effective.attention or "chosen by transformers",
        torch=torch.__version__,
        torch_threads=effective.threads,
        deterministic=deterministic,
        **environment,
    )
    return effective


def _prepare_npu(device: torch.device) -> dict[str, str]:
    """Sets what only NPUs have, before their first use; returns the effective variables."""
    # Tensors in the device's private formats cannot be overwritten by, or read as, plain ones; optimizers refuse them.
    torch.get_device_module(device).config.allow_internal_format = False
    for name, value in NPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return {name.lower(): os.environ[name] for name in NPU_ENVIRONMENT}


def prepare_for(config: RunConfig, *, torch_threads: int) -> Accelerator:
    """Applies the settings of a run, see `prepare`."""
    return prepare(
        device=config.device,
        attention=config.model.attention,
        torch_threads=torch_threads,
        deterministic=config.run.deterministic,
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    module = torch.get_device_module(device)
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else device.type
