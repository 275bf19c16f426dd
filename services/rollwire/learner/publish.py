"""A model's weights as what `WeightPublisher.publish` takes: one tensor at a time, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from rollwire.learner.lora import Adapter, merged_rows, served_weights, unsigned_zeros
from rollwire.rpc.digests import tensor_hasher
from rollwire.rpc.weight_low_rank import LowRank
from rollwire.rpc.weight_publisher import PublishedTensor
from rollwire.serving.model_tensors import layouts, to_host

PIECE_ELEMENTS: Final = 8 << 20
"""Elements that are cast and brought to the host at a time; this bounds the extra memory of publishing.

Where parameters are sharded it is one whole tensor more, on the device of each rank and in the serving dtype.
"""


def published(
    model: Any,
    serving_dtype: torch.dtype,
    piece_elements: int = PIECE_ELEMENTS,
    low_rank: dict[str, LowRank] | None = None,
) -> Iterator[PublishedTensor]:
    """Yields every weight, floating-point ones as `serving_dtype`. Ranks that share the model iterate together.

    Adapters are merged into the weights that they belong to.

    Args:
        model: The model.
        serving_dtype: Element type on the wire.
        piece_elements: Elements that are cast at a time.
        low_rank: Gets the adapters that tensors are merged from, each before its tensor is yielded, for
            `WeightPublisher.publish`. What is there from the last call says what the frozen W0 is.

    The pieces may share the model's memory: the weights must not change before the next one was taken.
    """
    found = layouts(model, serving_dtype)
    for served, name, tensor, adapter in served_weights(model):
        base = whole(tensor, serving_dtype)
        if adapter is None:
            parts: Iterable[torch.Tensor] = torch.split(base.reshape(-1), piece_elements)
        else:
            here = Adapter(whole(adapter.down, torch.float32), whole(adapter.up, torch.float32), adapter.scale)
            if low_rank is not None:
                known = low_rank.get(served)
                digest = known.base_digest if known is not None else _base_digest(base, serving_dtype, piece_elements)
                low_rank[served] = _factors(here, digest)
            parts = _merged(base, here, piece_elements)
        yield served, found[name], (to_host(part, serving_dtype).data for part in parts)


def _merged(base: torch.Tensor, adapter: Adapter, piece_elements: int) -> Iterator[torch.Tensor]:
    """Returns pieces of a weight with its adapter, some rows at a time."""
    rows = max(1, piece_elements // base.shape[1])
    return (
        merged_rows(base, adapter, first, min(first + rows, base.shape[0])) for first in range(0, base.shape[0], rows)
    )


def _base_digest(base: torch.Tensor, serving_dtype: torch.dtype, piece_elements: int) -> bytes:
    hasher = tensor_hasher()
    for part in torch.split(base.reshape(-1), piece_elements):
        hasher.update(to_host(unsigned_zeros(part), serving_dtype).data)
    return hasher.digest()


def _factors(adapter: Adapter, base_digest: bytes) -> LowRank:
    """Returns an adapter as it travels; a copy."""
    factors = (adapter.down.detach(), adapter.up.detach() * adapter.scale)
    payload = b"".join(to_host(factor, torch.float32).data for factor in factors)
    return LowRank(base_digest, adapter.down.shape[0], payload)


def whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a weight without gradient; one that is spread over ranks is cast to `dtype` and gathered."""
    weight: Any = tensor.detach()  # Any, because DTensor is a Tensor for type checkers
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    device = torch.device(weight.device_mesh.device_type)
    piece = weight.to(device=device, dtype=dtype) if weight.is_floating_point() else weight.to(device=device)
    gathered: torch.Tensor = piece.full_tensor()
    return gathered
