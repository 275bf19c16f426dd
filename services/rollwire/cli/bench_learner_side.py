"""One side of `rollwire bench learner`, in a process of its own: a model, a way to update it, and what a step took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from rollwire.cli.bench_learner_batch import Rollout, Shape, make_model
from rollwire.cli.bench_process import Commands, answer_commands
from rollwire.serving.logs import configure_logging

SIDES: Final = {
    "rollwire": "rollwire.cli.bench_learner_rollwire:RollwireSide",
    "trl": "rollwire.cli.bench_learner_trl:TrlSide",
    "plain": "rollwire.cli.bench_learner_plain:PlainSide",
}
"""Where each side's class is."""

CLIP: Final = 0.2
LEARNING_RATE: Final = 1e-6
MAX_GRAD_NORM: Final = 1.0
_SHOWN_ELEMENTS: Final = 4096

Gradient = Mapping[str, tuple[float, NDArray[np.float32]]]
"""Of each parameter the L2 norm of its gradient, and evenly spaced elements of it."""


@dataclass(frozen=True)
class Setup:
    """What all sides have in common, and what is each one's own.

    Attributes:
        shape: The model.
        vocabulary: Tokens that it knows.
        device: `cpu`, `cuda` or `npu`.
        precision: As `learner.precision`.
        gradient_checkpointing: Compute layers again in the backward pass.
        micro_batch_tokens: Rollwire: most tokens of a pass.
        trl_sequences: TRL: sequences of a pass.
        plain_sequences: The plain loop: sequences of a pass.
    """

    shape: Shape
    vocabulary: int
    device: str
    precision: str
    gradient_checkpointing: bool
    micro_batch_tokens: int
    trl_sequences: int
    plain_sequences: int


@dataclass(frozen=True)
class Step:
    """One update.

    Attributes:
        seconds: Wall time.
        cpu_s: CPU time of the process.
        loss: Before the update.
        peak_bytes: Most memory since the model was made, beyond what the process had before: of the device, or
            resident on the CPU.
        gradient: Of the loss, clipped, where it was asked for.
    """

    seconds: float
    cpu_s: float
    loss: float
    peak_bytes: int
    gradient: Gradient | None


class Side(Protocol):
    """A way to update a model.

    Attributes:
        optimizer: Torch's.
    """

    optimizer: Any

    def __init__(self, model: Any, setup: Setup, batch: list[Rollout]) -> None: ...

    def step(self) -> float:
        """Updates the model by the batch and returns the loss."""


def run_side(pipe: Connection, kind: str, setup: Setup) -> None:
    """Runs the process: takes `start`, `logprobs`, `prepare` and `step`."""
    from transformers.utils import logging as transformers_logging

    configure_logging(kind, level="WARNING")
    transformers_logging.set_verbosity_error()
    module, name = SIDES[kind].split(":")
    side_class: type[Side] = getattr(import_module(module), name)
    asyncio.run(answer_commands(pipe, _Process(side_class, setup).commands))


class _Process:
    def __init__(self, side_class: type[Side], setup: Setup) -> None:
        self._side_class = side_class
        self._setup = setup
        self._model: Any = None
        self._side: Side
        self._memory = _memory(setup.device)
        self.commands: Commands = {
            "start": self.start,
            "logprobs": self.logprobs,
            "prepare": self.prepare,
            "step": self.step,
        }

    async def start(self) -> int:
        """Makes the model and returns its number of parameters."""
        self._model = make_model(self._setup.shape, self._setup.vocabulary).to(self._setup.device)
        return sum(parameter.numel() for parameter in self._model.parameters())

    async def logprobs(self, batch: list[Rollout]) -> list[NDArray[np.float32]]:
        """Returns the model's own log-probabilities of each rollout's tokens."""
        from rollwire.cli.bench_learner_rollwire import own_logprobs

        return own_logprobs(self._model, self._setup, batch)

    async def prepare(self, batch: list[Rollout]) -> None:
        """Sets the side up for a batch."""
        self._side = self._side_class(self._model, self._setup, batch)
        self._memory.forget_peak()

    async def step(self, with_gradient: bool) -> Step:
        """Updates the model once."""
        gradients: list[Gradient] = []
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        hook = self._side.optimizer.register_step_pre_hook(
            lambda optimizer, *rest: gradients.append(_gradient(names)) if with_gradient else None
        )
        synchronise = self._memory.synchronise
        synchronise()
        began, cpu_began = time.perf_counter(), time.process_time()
        loss = self._side.step()
        synchronise()
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        hook.remove()
        return Step(seconds, cpu_s, loss, self._memory.peak_bytes(), gradients[0] if gradients else None)


def gradient_difference(left: Gradient, right: Gradient) -> float:
    """Returns how far two gradients are apart: over all parameters the largest relative L2 distance.

    A distance is relative to the parameter's gradient, or to a thousandth of the largest one: some gradients, such as
    that of a key's bias, are zero but for rounding.
    """
    if left.keys() != right.keys():
        return float("inf")
    floor = max(float(np.linalg.norm(values)) for _, values in right.values()) * 1e-3
    return max(
        float(np.linalg.norm(left[name][1] - values)) / max(float(np.linalg.norm(values)), floor)
        for name, (_, values) in right.items()
    )


def _gradient(names: Mapping[Any, str]) -> Gradient:
    found = {}
    for parameter, name in names.items():
        flat = parameter.grad.detach().flatten()
        stride = max(1, len(flat) // _SHOWN_ELEMENTS)
        found[name] = (float(flat.norm()), flat[::stride].float().cpu().numpy().copy())
    return found


class _HostMemory:
    """Resident memory of this process, beyond what it has now."""

    def __init__(self) -> None:
        self._idle = self._read("VmRSS")

    def forget_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        return self._read("VmHWM") - self._idle

    def synchronise(self) -> None:
        """All work on the CPU is done when a call returns."""

    def _read(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class _DeviceMemory:
    """Memory of the accelerator that torch has given out."""

    def __init__(self, device: str) -> None:
        import torch

        self._module = torch.get_device_module(device)

    def forget_peak(self) -> None:
        self._module.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        return int(self._module.max_memory_allocated())

    def synchronise(self) -> None:
        self._module.synchronize()


def _memory(device: str) -> _HostMemory | _DeviceMemory:
    return _HostMemory() if device == "cpu" else _DeviceMemory(device)
