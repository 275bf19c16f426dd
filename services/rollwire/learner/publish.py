"""A model's weights as what `WeightPublisher.publish` takes: one tensor at a time, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from rollwire.rpc.weight_publisher import PublishedTensor
from rollwire.serving.model_tensors import layouts, named_weights, to_host

PIECE_ELEMENTS: Final = 8 << 20
"""Elements that are cast and brought to the host at a time; this bounds the extra memory of publishing.

Where parameters are sharded it is one whole tensor more, on the device of each rank and in the serving dtype.
"""


def published(
    model: Any, serving_dtype: torch.dtype, piece_elements: int = PIECE_ELEMENTS
) -> Iterator[PublishedTensor]:
    """Yields every weight, floating-point ones as `serving_dtype`. Ranks that share the model iterate together.

    The pieces may share the model's memory: the weights must not change before the next one was taken.
    """
    found = layouts(model, serving_dtype)
    for name, tensor in named_weights(model):
        parts = torch.split(whole(tensor, serving_dtype).reshape(-1), piece_elements)
        yield name, found[name], (to_host(part, serving_dtype).data for part in parts)


def whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a weight without gradient; one that is spread over ranks is cast to `dtype` and gathered."""
    weight: Any = tensor.detach()  # Any, because DTensor is a Tensor for type checkers
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    device = torch.device(weight.device_mesh.device_type)
    piece = weight.to(device=device, dtype=dtype) if weight.is_floating_point() else weight.to(device=device)
    gathered: torch.Tensor = piece.full_tensor()
    return gathered
