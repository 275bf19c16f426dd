"""A second set of weights in host memory: filled while the first one computes, then put in its place at once."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

import torch

from rollwire.rpc.digests import tensor_digest, weights_digest
from rollwire.rpc.weight_stream import HostTensor
from rollwire.serving.model_tensors import copy_in, named_weights, to_host


class SecondWeights:
    """The second set of a model on the CPU. The memory of the set that was replaced holds the next one.

    Args:
        model: The model; its weights keep their shapes and types.
        serving_dtype: Element type of digests.
    """

    def __init__(self, model: Any, serving_dtype: torch.dtype) -> None:
        self._weights = dict(named_weights(model))
        self._dtype = serving_dtype
        self._memory: dict[str, torch.Tensor] = {}
        self._source: Mapping[str, HostTensor] | None = None
        self._digest = b""
        self._filling = Lock()

    def fill(self, tensors: Mapping[str, HostTensor]) -> None:
        """Copies tensors into the second set and hashes what it then holds; may run beside the model's passes."""
        with self._filling:  # an update that was given up may still be here
            self._source = None
            digests = []
            for name, weight in self._weights.items():
                memory = self._memory.get(name)
                if memory is None:
                    memory = self._memory[name] = torch.empty_like(weight)
                copy_in(memory, tensors[name])
                digests.append((name, tensor_digest(to_host(memory, self._dtype).data)))
            self._digest = weights_digest(digests)
            self._source = tensors

    def flip(self, tensors: Mapping[str, HostTensor]) -> bytes | None:
        """Puts the second set in place if it was filled from these very tensors; nothing may compute meanwhile.

        Returns:
            `WeightManifest.digest` (32 bytes) of what the model now holds; None if nothing has changed.
        """
        with self._filling:
            source, self._source = self._source, None
            if source is not tensors:
                return None
            for name, weight in self._weights.items():
                self._memory[name], weight.data = weight.data, self._memory[name]
            return self._digest

    def drop(self) -> None:
        """Frees the second set's memory."""
        with self._filling:
            self._source = None
            self._memory.clear()
