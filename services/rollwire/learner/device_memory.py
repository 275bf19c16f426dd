"""Moves what a learner has on its device to host memory and back: parameters, buffers, moments.

The reference is in host memory whenever nobody asks it, see `reference.py`, and gradients exist only during a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import grpc
import torch

from rollwire.learner.distributed import Ranks
from rollwire.rpc.errors import Reason, RollwireError, exhausted
from rollwire.serving.logs import get_logger

_log = get_logger(__name__)
_HOST: Final = torch.device("cpu")
_MEMORY_RETRY_S: Final = 2.0
_SHOWN_CAUSE: Final = 200


class DeviceMemory:
    """What one rank has on its device. On CPU everything stays where it is.

    Args:
        models: Modules; those that the sharding keeps in host memory anyway are to be left out.
        optimizers: Their optimizers.
        device: The device.
        ranks: All ranks call the methods together.
    """

    def __init__(
        self, models: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer], device: torch.device, ranks: Ranks
    ) -> None:
        self._models = models
        self._optimizers = optimizers
        self._device = device
        self._ranks = ranks
        self._moved: list[tuple[dict[str, Any], str]] = []  # moments in host memory whose place is the device

    def leave(self) -> int:
        """Moves everything to the host; returns the bytes given back, over all ranks."""
        before = self._reserved_bytes()
        self._to_host()
        return int(sum(self._ranks.gather(max(0, before - self._reserved_bytes()))))

    def come_back(self) -> None:
        """Moves everything to the device, on all ranks or on none.

        Raises:
            RollwireError: RESOURCE_EXHAUSTED / `DEVICE_MEMORY_EXHAUSTED`; then everything is in host memory.
        """
        problem = None
        try:
            self._to_device()
        except torch.OutOfMemoryError as error:
            problem = _exhausted(_shown(error))
        try:
            self._ranks.agree(problem)
        except RollwireError as error:
            _log.warning("still asleep: the device's memory is not free", error=error.message)
            self._to_host()
            raise

    def _to_host(self) -> None:
        for model in self._models:
            self._move_model(model, _HOST)
        for state in self._states():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.device.type != _HOST.type:
                    state[key] = self._moved_tensor(value, _HOST)
                    self._moved.append((state, key))
        if self._device.type != _HOST.type:
            torch.get_device_module(self._device).empty_cache()

    def _to_device(self) -> None:
        for model in self._models:
            self._move_model(model, self._device)
        while self._moved:
            state, key = self._moved[-1]
            state[key] = self._moved_tensor(state[key], self._device)
            self._moved.pop()

    def _move_model(self, model: Any, place: torch.device) -> None:
        if self._device.type != _HOST.type:
            model.to(place)

    def _moved_tensor(self, value: torch.Tensor, place: torch.device) -> torch.Tensor:
        return value.to(place)

    def _states(self) -> Iterable[dict[str, Any]]:
        for optimizer in self._optimizers:
            yield from optimizer.state.values()

    def _reserved_bytes(self) -> int:
        if self._device.type == _HOST.type:
            return 0
        return int(torch.get_device_module(self._device).memory_reserved())


def out_of_memory(error: BaseException, micro_batch_tokens: int) -> RollwireError:
    """Returns the error of a pass that the device has not enough memory for; asking again would not help."""
    return RollwireError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.DEVICE_MEMORY_EXHAUSTED,
        f"the device has not enough memory for a pass ({_shown(error)}); lower learner.micro_batch_tokens (now "
        f"{micro_batch_tokens}), which bounds all passes but those of a longer sample, or set "
        "learner.gradient_checkpointing=true",
    )


def _shown(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:_SHOWN_CAUSE]


def _exhausted(cause: str) -> RollwireError:
    return exhausted(
        Reason.DEVICE_MEMORY_EXHAUSTED,
        f"the device's memory is not free ({cause}); the learner stays asleep: end what uses the device, or put it to "
        "sleep, and call Wake again",
        _MEMORY_RETRY_S,
    )
