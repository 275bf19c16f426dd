"""A model's weights as what `WeightPublisher.publish` takes: one tensor at a time, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from rollwire.rpc.weight_publisher import PublishedTensor
from rollwire.serving.model_tensors import layouts, named_weights, to_host

PIECE_ELEMENTS: Final = 8 << 20
"""Elements that are cast and brought to the host at a time; this bounds the extra memory of publishing."""


def published(
    model: Any, serving_dtype: torch.dtype, piece_elements: int = PIECE_ELEMENTS
) -> Iterator[PublishedTensor]:
    """Yields every weight, floating-point ones as `serving_dtype`.

    The pieces may share the model's memory: the weights must not change before the next one was taken.
    """
    found = layouts(model, serving_dtype)
    for name, tensor in named_weights(model):
        parts = torch.split(tensor.detach().reshape(-1), piece_elements)
        yield name, found[name], (to_host(part, serving_dtype).data for part in parts)
