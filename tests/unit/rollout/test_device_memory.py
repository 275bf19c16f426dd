"""Freeing a model's memory in place; CPU tensors stand in for a device's, whose allocator is replaced at its module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollwire.rollout.engines.device_memory import DeviceMemory


class OnDevice:
    """A model whose tensors count as being on an accelerator."""

    device = torch.device("cuda")

    def __init__(self, model: Any) -> None:
        self.parameters = model.parameters
        self.buffers = model.buffers


class Allocator:
    """Stands in for `torch.cuda`."""

    emptied = 0

    @staticmethod
    def memory_reserved(device: torch.device) -> int:
        return 123

    @classmethod
    def empty_cache(cls) -> None:
        cls.emptied += 1


@pytest.fixture(autouse=True)
def allocator(monkeypatch: pytest.MonkeyPatch) -> type[Allocator]:
    monkeypatch.setattr(torch, "get_device_module", lambda device: Allocator)
    return Allocator


def stored_bytes(model: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in [*model.parameters(), *model.buffers()])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([[5, 6, 7, 8]])).logits
    return found


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2"])
def test_what_is_kept_comes_back_into_the_same_tensors(make_model: Callable[..., Any], name: str) -> None:
    model = make_model(name)
    before, size, identities = logits(model), stored_bytes(model), [id(tensor) for tensor in model.parameters()]
    with torch.inference_mode():  # as in the decoding thread
        memory = DeviceMemory(OnDevice(model))
        memory.free(discard=False)
        assert stored_bytes(model) == 0
        memory.free(discard=False)
        memory.take()
        memory.take()
    assert stored_bytes(model) == size and [id(tensor) for tensor in model.parameters()] == identities
    assert torch.equal(logits(model), before)
    assert all(tensor.requires_grad for tensor in model.parameters())


@pytest.mark.parametrize("kept_first", [True, False])
def test_what_is_dropped_only_has_its_shape(make_model: Callable[..., Any], kept_first: bool) -> None:
    model, other = make_model("qwen2"), make_model("qwen2", seed=0)
    memory = DeviceMemory(OnDevice(model))
    if kept_first:
        memory.free(discard=False)
    memory.free(discard=True)
    assert stored_bytes(model) == 0
    memory.take()
    for tensor in model.parameters():
        tensor.data.fill_(7.0)
    with torch.no_grad():
        for tensor, source in zip(model.parameters(), other.parameters(), strict=True):
            tensor.copy_(source)
    assert torch.equal(logits(model), logits(other)), "buffers must come back although parameters do not"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("NPU out of memory. Tried 2 GiB")])
def test_without_memory_nothing_changes(make_model: Callable[..., Any], error: RuntimeError) -> None:
    model = make_model("qwen2")
    before = logits(model)
    memory = DeviceMemory(OnDevice(model))
    memory.free(discard=False)
    emptied, failing = Allocator.emptied, True

    class Storage:
        def __init__(self, storage: torch.UntypedStorage) -> None:
            self._storage = storage

        def resize_(self, size: int) -> None:
            if size and failing:
                raise error
            self._storage.resize_(size)

    memory._freed[5] = (Storage(memory._freed[5][0]), memory._freed[5][1])  # type: ignore[call-overload]
    with pytest.raises(torch.OutOfMemoryError):
        memory.take()
    assert stored_bytes(model) == 0 and Allocator.emptied == emptied + 1
    failing = False
    memory.take()
    assert torch.equal(logits(model), before)


def test_on_cpu_only_what_is_dropped_is_freed(make_model: Callable[..., Any]) -> None:
    model = make_model("qwen2")
    before, size = logits(model), stored_bytes(model)
    memory = DeviceMemory(model)
    memory.free(discard=False)
    assert torch.equal(logits(model), before) and memory.allocated_bytes() == 0
    memory.free(discard=True)
    assert stored_bytes(model) < size / 10
    memory.take()
    assert stored_bytes(model) == size and memory.allocated_bytes() == 0
