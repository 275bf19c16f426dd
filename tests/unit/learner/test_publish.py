"""Snapshots and the versions that are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollwire.learner.publish import PublishedVersions, take_snapshot
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.weight_stream import WeightAssembler
from rollwire.serving.model_tensors import copy_all_in, held_digest, layouts
from rollwire.v1.weights_pb2 import DATA_TYPE_BFLOAT16, WeightVersion


def version(step: int) -> WeightVersion:
    return WeightVersion(lineage="line", step=step)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stream_brings_the_weights_bit_for_bit(
    tied: bool, dtype: torch.dtype, make_model: Callable[..., Any]
) -> None:
    model = make_model(tie_word_embeddings=tied)
    snapshot = take_snapshot(model, version(3), dtype)
    reader = make_model(seed=1, tie_word_embeddings=tied).to(dtype)
    assembler = WeightAssembler(layouts(reader, dtype), version(3))

    for message in snapshot.messages():
        assembler.feed(message)
    copy_all_in(reader, assembler.tensors())

    assert assembler.digest == snapshot.manifest.digest == held_digest(reader, dtype)
    for sent, arrived in zip(model.parameters(), reader.parameters(), strict=True):
        assert torch.equal(sent.to(dtype), arrived)


def test_a_tied_tensor_is_published_once_under_the_name_in_checkpoints(make_model: Callable[..., Any]) -> None:
    names = set(take_snapshot(make_model(tie_word_embeddings=True), version(0), torch.float32).tensors)

    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_on_does_not_change_a_snapshot(dtype: torch.dtype, make_model: Callable[..., Any]) -> None:
    model = make_model()
    snapshot = take_snapshot(model, version(0), dtype)
    streamed = [message.SerializeToString() for message in snapshot.messages()]

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)

    assert [message.SerializeToString() for message in snapshot.messages()] == streamed
    assert take_snapshot(model, version(1), dtype).manifest.digest != snapshot.manifest.digest


def test_bfloat16_travels_as_two_bytes(make_model: Callable[..., Any]) -> None:
    for tensor in take_snapshot(make_model(), version(0), torch.bfloat16).manifest.tensors:
        elements = 1
        for extent in tensor.shape:
            elements *= extent
        assert tensor.dtype == DATA_TYPE_BFLOAT16
        assert tensor.byte_size == 2 * elements


def test_only_the_newest_versions_are_kept(make_model: Callable[..., Any]) -> None:
    published = PublishedVersions(kept=2)
    snapshots = [take_snapshot(make_model(), version(step), torch.float32) for step in range(3)]
    for snapshot in snapshots:
        published.add(snapshot)

    assert published.latest is snapshots[2]
    assert published.get(WeightVersion()) is snapshots[2]
    assert published.get(version(1)) is snapshots[1]
    for unknown in (version(0), version(3), WeightVersion(lineage="other", step=2)):
        with pytest.raises(RollwireError, match="held: line@1, line@2") as caught:
            published.get(unknown)
        assert caught.value.reason == Reason.UNKNOWN_VERSION
