"""Watching a model load weights: where did every byte go, and is anything stale?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rollwire.rollout.engines.weight_copies import CopyWatch, MappedWeights, read_back
from rollwire.rollout.host_file import HostFile
from rollwire.rpc.weight_stream import TensorLayout
from rollwire.serving.model_tensors import to_host


def mapped(**tensors: torch.Tensor) -> MappedWeights:
    file = HostFile.around({name: to_host(tensor, tensor.dtype) for name, tensor in tensors.items()})
    return MappedWeights(file.path, file.entries)


def held_tensors(watch: CopyWatch, weights: MappedWeights) -> dict[str, torch.Tensor]:
    file = HostFile.empty({entry.name: TensorLayout(entry.dtype, entry.shape) for entry in weights.entries})
    read_back(watch.parts, MappedWeights(file.path, file.entries, writable=True))
    return {name: tensor.clone() for name, tensor in MappedWeights(file.path, file.entries).tensors.items()}


def load(weights: MappedWeights, loader: Callable[[dict[str, torch.Tensor]], None]) -> CopyWatch:
    watch = CopyWatch(weights)
    with watch, torch.no_grad():
        loader(weights.tensors)
    return watch


def test_fused_split_transposed_and_scalar_tensors_are_read_back_exactly() -> None:
    torch.manual_seed(0)
    originals = {
        "q": torch.randn(6, 4),
        "k": torch.randn(2, 4),
        "transposed": torch.randn(3, 5),
        "scalar": torch.randn(()),
        "one": torch.randn(1),
        "nan": torch.tensor([float("nan"), -0.0]),
    }
    fused = torch.nn.Parameter(torch.zeros(8, 4))
    turned = torch.nn.Parameter(torch.zeros(5, 3))
    scalar, one, nan = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((), (1,), (2,)))

    def loader(tensors: dict[str, torch.Tensor]) -> None:
        fused.data.narrow(0, 0, 6).copy_(tensors["q"])
        fused.data[6:].copy_(tensors["k"])
        turned.data.copy_(tensors["transposed"].t())
        scalar.data.fill_(tensors["scalar"].item())
        one.data.copy_(tensors["one"])
        nan.data.copy_(tensors["nan"])

    weights = mapped(**originals)
    watch = load(weights, loader)
    assert watch.differing() == []
    assert watch.transformed == set()
    assert watch.held() == {name: tensor.numel() for name, tensor in weights.tensors.items()}
    parameters = {"fused": fused, "turned": turned, "scalar": scalar, "one": one, "nan": nan}
    assert watch.unwritten(parameters.items()) == []
    found = held_tensors(watch, weights)
    for name, original in originals.items():
        assert found[name].contiguous().view(-1).view(torch.uint8).equal(original.view(-1).view(torch.uint8)), name


def test_a_change_after_the_load_is_seen() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    weights = mapped(weight=torch.ones(4))
    watch = load(weights, lambda tensors: parameter.data.copy_(tensors["weight"]))
    assert watch.differing() == []
    parameter.data[2] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert watch.differing() == ["weight"]
    assert held_tensors(watch, weights)["weight"][2] != 1


def test_narrowing_copies_differ_and_widening_copies_do_not() -> None:
    narrow, wide = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)

    def loader(tensors: dict[str, torch.Tensor]) -> None:
        narrow.copy_(tensors["single"])
        wide.copy_(tensors["half"])

    weights = mapped(single=torch.tensor([1.0, 1.001]), half=torch.tensor([1.0, 3.0], dtype=torch.bfloat16))
    assert load(weights, loader).differing() == ["single"]


def test_ignored_partial_and_transformed_tensors_are_told_apart() -> None:
    parameter = torch.zeros(4)

    def loader(tensors: dict[str, torch.Tensor]) -> None:
        parameter[:2].copy_(tensors["partial"][:2])
        parameter[2:].copy_(tensors["transformed"] + 1)

    weights = mapped(ignored=torch.ones(2), partial=torch.ones(4), transformed=torch.ones(2))
    watch = load(weights, loader)
    held = watch.held()
    assert held == {"ignored": 0, "partial": 2, "transformed": 0}
    assert watch.transformed == {"transformed"}


def test_stale_parameters_are_named() -> None:
    padded = torch.nn.Parameter(torch.zeros(4, 2))
    half, never = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(3))

    def loader(tensors: dict[str, torch.Tensor]) -> None:
        padded.data[:3].copy_(tensors["embedding"])
        padded.data[3:].fill_(0)
        half.data[:2].copy_(tensors["half"])
        half.data[:2].copy_(tensors["half"])

    weights = mapped(embedding=torch.ones(3, 2), half=torch.ones(2))
    watch = load(weights, loader)
    assert watch.unwritten({"padded": padded, "half": half, "never": never}.items()) == ["half", "never"]


def test_one_tensor_in_two_places_is_held_once_and_compared_twice() -> None:
    embedding, head = torch.zeros(3, 2), torch.zeros(3, 2)

    def loader(tensors: dict[str, torch.Tensor]) -> None:
        embedding.copy_(tensors["embedding"])
        head.copy_(tensors["embedding"])

    weights = mapped(embedding=torch.ones(3, 2))
    watch = load(weights, loader)
    assert watch.held() == {"embedding": 6}
    head[0, 0] = 2
    assert watch.differing() == ["embedding"]


def test_a_private_mapping_does_not_change_the_file() -> None:
    file = HostFile.around({"weight": to_host(torch.ones(4), torch.float32)})
    MappedWeights(file.path, file.entries).tensors["weight"].zero_()
    assert bytes(file["weight"].data) == torch.ones(4).numpy().tobytes()


@pytest.mark.parametrize("foreign", [torch.ones(4), torch.empty(0), torch.ones(4, device="meta")])
def test_foreign_memory_is_not_located(foreign: torch.Tensor) -> None:
    weights = mapped(weight=torch.ones(4))
    assert weights.locate(foreign) is None
