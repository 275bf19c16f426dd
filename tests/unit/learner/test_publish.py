"""What the learner publishes: every weight once, bit for bit, copied before training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollwire.learner.publish import published
from rollwire.rpc.weight_publisher import WeightPublisher
from rollwire.rpc.weight_stream import WeightAssembler
from rollwire.serving.model_tensors import copy_all_in, held_digest, layouts
from rollwire.v1.weights_pb2 import DATA_TYPE_BFLOAT16, FetchWeightsRequest, WeightVersion


def version(step: int) -> WeightVersion:
    return WeightVersion(lineage="line", step=step)


@pytest.mark.parametrize("piece_elements", [100, 1 << 20])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stream_brings_the_weights_bit_for_bit(
    tied: bool, dtype: torch.dtype, piece_elements: int, make_model: Callable[..., Any]
) -> None:
    model = make_model(tie_word_embeddings=tied)
    publisher = WeightPublisher()
    manifest = publisher.publish(version(3), published(model, dtype, piece_elements))
    reader = make_model(seed=1, tie_word_embeddings=tied).to(dtype)

    with WeightAssembler(layouts(reader, dtype), version(3)) as assembler:
        for message in publisher.open(FetchWeightsRequest()):
            assembler.feed(message)
        copy_all_in(reader, assembler.tensors())

    assert assembler.digest == manifest.digest == held_digest(reader, dtype)
    for sent, arrived in zip(model.parameters(), reader.parameters(), strict=True):
        assert torch.equal(sent.to(dtype), arrived)


def test_a_weight_that_is_not_contiguous_is_published_in_its_own_order(make_model: Callable[..., Any]) -> None:
    model = make_model()
    with torch.no_grad():
        parameter = model.model.layers[0].mlp.down_proj.weight
        parameter.set_(parameter.t().contiguous().t())
    assert not parameter.is_contiguous()

    manifest = WeightPublisher().publish(version(0), published(model, torch.float32, 100))

    assert manifest.digest == held_digest(model, torch.float32)


def test_a_tied_tensor_is_published_once_under_the_name_in_checkpoints(make_model: Callable[..., Any]) -> None:
    names = [name for name, _, _ in published(make_model(tie_word_embeddings=True), torch.float32)]

    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_on_does_not_change_what_was_published(dtype: torch.dtype, make_model: Callable[..., Any]) -> None:
    model = make_model()
    publisher = WeightPublisher()
    manifest = publisher.publish(version(0), published(model, dtype))
    streamed = list(publisher.open(FetchWeightsRequest()))

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)

    assert list(publisher.open(FetchWeightsRequest())) == streamed
    assert publisher.publish(version(1), published(model, dtype)).digest != manifest.digest


def test_bfloat16_travels_as_two_bytes(make_model: Callable[..., Any]) -> None:
    for _, layout, pieces in published(make_model(), torch.bfloat16, 100):
        sizes = [piece.nbytes for piece in pieces]
        assert layout.dtype == DATA_TYPE_BFLOAT16
        assert sum(sizes) == layout.byte_size == 2 * layout.elements
        assert max(sizes) <= 200
