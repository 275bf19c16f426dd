"""Freeing the device's memory of a model in place, and taking it again: whoever refers to a tensor goes on doing so."""

from __future__ import annotations

import gc
from typing import Any

import torch


class DeviceMemory:
    """The device's share of a model.

    Tensors stay on their device and lose their storage, which is how FSDP frees parameters as well: moving them would
    replace parameters on devices whose tensors torch does not take for interchangeable with the CPU's.

    On the CPU the device's memory is the host's, so nothing is freed there but what is dropped.

    Args:
        model: A model, all of whose tensors are on one device.
    """

    def __init__(self, model: Any) -> None:
        self._device: torch.device = model.device
        self._parameters = list(model.parameters())
        # No update brings, for example, the tables of rotary embeddings: buffers are never dropped.
        self._buffers = list(model.buffers())
        self._freed: list[tuple[torch.UntypedStorage, int]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def free(self, *, discard: bool) -> None:
        """Frees the storage of the model's tensors.

        Args:
            discard: Drop the parameters instead of keeping them in host memory. May follow a call that kept them.
        """
        if discard:
            dropped = {id(parameter) for parameter in self._parameters}
            self._copies = [(tensor, copy) for tensor, copy in self._copies if id(tensor) not in dropped]
        if self._freed:
            return
        kept = list(self._buffers) if discard else [*self._parameters, *self._buffers]
        if self._device.type != "cpu":
            self._copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in kept]
            kept = []
        excepted = {tensor.untyped_storage().data_ptr() for tensor in kept}
        for tensor in [*self._parameters, *self._buffers]:
            storage = tensor.untyped_storage()
            # A mapped file cannot be resized, and takes no memory of its own.
            if storage.nbytes() and storage.data_ptr() not in excepted and storage.resizable():
                self._freed.append((storage, storage.nbytes()))
                storage.resize_(0)
        self.give_back()

    def take(self) -> None:
        """Takes the memory again and restores what was kept; what was dropped has arbitrary contents.

        Raises:
            torch.OutOfMemoryError: There is not enough memory; nothing has changed.
        """
        try:
            for storage, size_bytes in self._freed:
                storage.resize_(size_bytes)
        except RuntimeError as error:
            for storage, _ in self._freed:
                storage.resize_(0)
            self.give_back()
            if isinstance(error, torch.OutOfMemoryError) or "out of memory" not in str(error):
                raise
            raise torch.OutOfMemoryError(str(error)) from error
        for tensor, copy in self._copies:
            tensor.detach().copy_(copy)
        self._freed, self._copies = [], []

    def allocated_bytes(self) -> int:
        """Returns what the device's allocator has taken for this process; 0 on CPU."""
        if self._device.type == "cpu":
            return 0
        return int(torch.get_device_module(self._device).memory_reserved(self._device))

    def give_back(self) -> None:
        """Returns the allocator's cached blocks to the device."""
        gc.collect()
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()
