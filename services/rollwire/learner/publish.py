"""A model's weights as what `WeightPublisher.publish` takes: one tensor at a time, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from rollwire.learner.lora import Adapter, merged_rows, served_weights
from rollwire.rpc.weight_publisher import PublishedTensor
from rollwire.serving.model_tensors import layouts, to_host

PIECE_ELEMENTS: Final = 8 << 20
"""Elements that are cast and brought to the host at a time; this bounds the extra memory of publishing.

Where parameters are sharded it is one whole tensor more, on the device of each rank and in the serving dtype.
"""


def published(
    model: Any, serving_dtype: torch.dtype, piece_elements: int = PIECE_ELEMENTS
) -> Iterator[PublishedTensor]:
    """Yields every weight, floating-point ones as `serving_dtype`. Ranks that share the model iterate together.

    Adapters are merged into the weights that they belong to.

    The pieces may share the model's memory: the weights must not change before the next one was taken.
    """
    found = layouts(model, serving_dtype)
    for served, name, tensor, adapter in served_weights(model):
        base = whole(tensor, serving_dtype)
        if adapter is None:
            parts: Iterable[torch.Tensor] = torch.split(base.reshape(-1), piece_elements)
        else:
            parts = _merged(base, adapter, piece_elements)
        yield served, found[name], (to_host(part, serving_dtype).data for part in parts)


def _merged(base: torch.Tensor, adapter: Adapter, piece_elements: int) -> Iterator[torch.Tensor]:
    """Returns pieces of a weight with its adapter, some rows at a time; gathers the adapter at once."""
    here = Adapter(whole(adapter.down, torch.float32), whole(adapter.up, torch.float32), adapter.scale)
    rows = max(1, piece_elements // base.shape[1])
    return (merged_rows(base, here, first, min(first + rows, base.shape[0])) for first in range(0, base.shape[0], rows))


def whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a weight without gradient; one that is spread over ranks is cast to `dtype` and gathered."""
    weight: Any = tensor.detach()  # Any, because DTensor is a Tensor for type checkers
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    device = torch.device(weight.device_mesh.device_type)
    piece = weight.to(device=device, dtype=dtype) if weight.is_floating_point() else weight.to(device=device)
    gathered: torch.Tensor = piece.full_tensor()
    return gathered
