"""A model's weights by name, as learner and rollout servers both see them on the wire.

Both ends derive names, order and tying from the same function, so that a manifest of one fits the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from rollwire.rpc.digests import tensor_digest, weights_digest
from rollwire.rpc.weight_stream import HostTensor, TensorLayout
from rollwire.serving.server import ServeError
from rollwire.v1 import weights_pb2

WIRE_TYPES: Final = {
    torch.float32: weights_pb2.DATA_TYPE_FLOAT32,
    torch.float16: weights_pb2.DATA_TYPE_FLOAT16,
    torch.bfloat16: weights_pb2.DATA_TYPE_BFLOAT16,
    torch.int64: weights_pb2.DATA_TYPE_INT64,
}
TORCH_TYPES: Final = {wire: native for native, wire in WIRE_TYPES.items()}
SERVING_TYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The values of `model.dtype`."""


def named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and tensor of every weight: parameters, then persistent buffers.

    A tied tensor appears once, under the first of its names, which is the one that checkpoints have.
    """
    yield from model.named_parameters()
    kept = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in kept:
            yield name, buffer


def layouts(model: Any, serving_dtype: torch.dtype) -> dict[str, TensorLayout]:
    """Returns the layout of every weight on the wire; floating-point weights travel as `serving_dtype`.

    Raises:
        ServeError: The model holds a tensor of a type that the wire does not have.
    """
    found = {}
    for name, tensor in named_weights(model):
        dtype = serving_dtype if tensor.is_floating_point() else tensor.dtype
        if dtype not in WIRE_TYPES:
            raise ServeError(
                f"the model's tensor {name} is {dtype}; weights may be float32, float16, bfloat16 or int64"
            )
        found[name] = TensorLayout(WIRE_TYPES[dtype], tuple(tensor.shape))
    return found


def to_host(tensor: torch.Tensor, serving_dtype: torch.dtype) -> HostTensor:
    """Returns a tensor as it travels: in host memory, contiguous, floating-point values cast to `serving_dtype`.

    The memory is shared with a tensor that already is all of that; copy it if the tensor will change.
    """
    dtype = serving_dtype if tensor.is_floating_point() else tensor.dtype
    host = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    flat: Any = host.reshape(-1).view(torch.uint8).numpy()
    return HostTensor(WIRE_TYPES[dtype], tuple(tensor.shape), memoryview(flat))


def copy_in(target: torch.Tensor, source: HostTensor) -> None:
    """Overwrites a tensor in place with one that arrived; shapes are equal."""
    arrived = torch.frombuffer(source.data, dtype=TORCH_TYPES[source.dtype]).reshape(source.shape)
    with torch.no_grad():
        target.copy_(arrived)


def held_digest(model: Any, serving_dtype: torch.dtype) -> bytes:
    """Returns `WeightManifest.digest` (32 bytes) computed from what the model holds."""
    return weights_digest(
        (name, tensor_digest(to_host(tensor, serving_dtype).data)) for name, tensor in named_weights(model)
    )


def copy_all_in(model: Any, tensors: Mapping[str, HostTensor]) -> None:
    """Overwrites every weight of a model in place; `tensors` has exactly the names of `layouts`."""
    for name, target in named_weights(model):
        copy_in(target, tensors[name])
