"""A second set of weights, filled beside the first and put in place at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollwire.rollout.engines.weight_copies import CopyWatch, MappedWeights, Parts, held_elements
from rollwire.rollout.engines.weight_stage import CannotStageError, WeightStage
from rollwire.rollout.host_file import HostFile
from rollwire.serving.model_tensors import to_host


class Fused(torch.nn.Module):
    """Two checkpoint tensors in one weight, with two rows of padding; computes with a packed copy."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((7, 4), 9.0), requires_grad=False)
        self.weight[5:] = 0
        self.packed = self.weight.clone()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Fused()
        self.norm = torch.nn.LayerNorm(4)
        self.norm.requires_grad_(False)
        self.head = torch.nn.Module()
        self.head.weight = self.layer.weight

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        if "q" in tensors:
            self.layer.weight.data[:3].copy_(tensors["q"])
        if "k" in tensors:
            self.layer.weight.data[3:5].copy_(tensors["k"])
        for name in ("weight", "bias"):
            if name in tensors:
                getattr(self.norm, name).data.copy_(tensors[name])

    def state(self) -> list[torch.Tensor]:
        return [self.layer.weight.clone(), self.layer.packed.clone(), self.norm.weight.clone(), self.norm.bias.clone()]


def random_tensors(*names: str) -> dict[str, torch.Tensor]:
    shapes = {"q": (3, 4), "k": (2, 4), "weight": (4,), "bias": (4,)}
    return {name: torch.randn(shapes[name]) for name in names or shapes}


def mapped(tensors: dict[str, torch.Tensor]) -> MappedWeights:
    file = HostFile.around({name: to_host(tensor, tensor.dtype) for name, tensor in tensors.items()})
    return MappedWeights(file.path, file.entries)


def watched(model: Any, tensors: dict[str, torch.Tensor]) -> Parts:
    weights = mapped(tensors)
    watch = CopyWatch(weights)
    with watch, torch.no_grad():
        model.load(weights.tensors)
    return watch.parts


def stage(model: Any, parts: Parts, spare: dict[int, torch.Tensor], complete: bool = True) -> WeightStage:
    return WeightStage(
        model, parts, spare, complete=complete, packed="packed", pack=lambda module, weight: weight.clone()
    )


def expected_after(model: Model, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    other = Model()
    other.load_state_dict(model.state_dict())
    other.load(tensors)
    other.layer.packed = other.layer.weight.clone()
    return other.state()


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nothing_changes_before_the_flip_and_everything_by_it() -> None:
    torch.manual_seed(0)
    model = Model()
    parts = watched(model, random_tensors())
    model.layer.packed = model.layer.weight.clone()
    spare: dict[int, torch.Tensor] = {}
    addresses = set()
    for _ in range(5):
        tensors = random_tensors()
        before, expected = model.state(), expected_after(model, tensors)
        second = stage(model, parts, spare)
        for _ in second.fill(mapped(tensors)):
            assert same(model.state(), before)
        assert second.differing == []
        parts = second.flip()
        assert same(model.state(), expected)
        assert model.head.weight is model.layer.weight
        assert held_elements(parts) == {"q": 12, "k": 8, "weight": 4, "bias": 4}
        assert all(torch.equal(part.destination, part.of(tensors[name])) for name in parts for part in parts[name])
        addresses.add(model.layer.weight.data_ptr())
    assert len(addresses) == 2, "two sets take turns"


def test_what_is_not_sent_keeps_its_value() -> None:
    torch.manual_seed(1)
    model = Model()
    parts = watched(model, random_tensors())
    model.layer.packed = model.layer.weight.clone()
    spare: dict[int, torch.Tensor] = {}
    for names in (["k"], ["q", "bias"], ["k"], ["weight"], ["q"]):
        tensors = random_tensors(*names)
        expected = expected_after(model, tensors)
        second = stage(model, parts, spare, complete=False)
        for _ in second.fill(mapped(tensors)):
            pass
        parts = second.flip()
        assert same(model.state(), expected)


def test_a_set_that_was_given_up_leaves_no_trace() -> None:
    torch.manual_seed(2)
    model = Model()
    parts = watched(model, random_tensors())
    model.layer.packed = model.layer.weight.clone()
    spare: dict[int, torch.Tensor] = {}
    for steps in range(7):
        before = model.state()
        for _ in zip(range(steps), stage(model, parts, spare).fill(mapped(random_tensors())), strict=False):
            pass
        assert same(model.state(), before)
        tensors = random_tensors()
        expected = expected_after(model, tensors)
        second = stage(model, parts, spare)
        for _ in second.fill(mapped(tensors)):
            pass
        parts = second.flip()
        assert same(model.state(), expected)


def test_values_that_the_model_cannot_hold_differ() -> None:
    model = Model()
    parts = watched(model, random_tensors())
    model.norm.half()
    parts = {**parts, "weight": watched(model, random_tensors("weight"))["weight"]}
    second = stage(model, parts, {}, complete=False)
    for _ in second.fill(mapped({"weight": torch.tensor([1.0, 2.0, 1.0001, 4.0])})):
        pass
    assert second.differing == ["weight"]


def test_models_that_cannot_be_staged() -> None:
    shared = Model()
    shared.norm.bias.data = shared.norm.weight.data
    parts = watched(shared, random_tensors())
    with pytest.raises(CannotStageError, match="share memory"):
        list(stage(shared, parts, {}).fill(mapped(random_tensors())))
    model = Model()
    parts = watched(model, random_tensors("q", "weight"))
    for transformed in (set(), {"q", "k"}):
        with pytest.raises(CannotStageError, match="no load has shown"):
            list(stage(model, parts, {}).fill(mapped(random_tensors("q", "k")), transformed))
    with pytest.raises(CannotStageError, match="no load has shown"):
        list(stage(model, parts, {}).fill(mapped(random_tensors("q")), {"q"}))
    model.norm.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    with pytest.raises(CannotStageError, match="memory that is no parameter"):
        list(stage(model, parts, {}).fill(mapped(random_tensors("weight"))))
    gaps = Model()
    gaps.norm.weight.data = torch.ones(8)[::2]
    parts = watched(gaps, random_tensors())
    with pytest.raises(CannotStageError, match="gaps"):
        list(stage(gaps, parts, {}).fill(mapped(random_tensors("weight"))))
