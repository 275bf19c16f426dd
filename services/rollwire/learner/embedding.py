"""The gradient of the token embedding, added where it belongs.

Torch makes a gradient of the whole table for every pass, zeros but for the rows of the pass's tokens, and then adds it
to the one that there is. With a large vocabulary that is more memory and time than the pass itself may take.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn


@contextmanager
def rows_added_to_gradient(model: Any) -> Iterator[None]:
    """Makes forward passes inside such that their backward pass adds to the rows of the embedding's `grad` in place.

    Then `torch.autograd.grad` gets no gradient of the embedding, and hooks on it are not called. An embedding that is
    not plainly a table, or is not trained, is left as it is.
    """
    table = model.get_input_embeddings()
    special = type(table) is not nn.Embedding or "forward" in vars(table)
    if special or table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
        yield
        return
    plain = table.forward

    def forward(input_ids: Tensor) -> Tensor:
        weight = table.weight
        if not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf):
            return cast(Tensor, plain(input_ids))
        rows: Tensor = _Rows.apply(weight, input_ids, table.padding_idx)  # type: ignore[no-untyped-call]
        return rows

    table.forward = forward
    try:
        yield
    finally:
        del table.forward


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, input_ids: Tensor, padding_id: int | None) -> Tensor:
        ctx.save_for_backward(input_ids)
        ctx.weight, ctx.padding_id = weight, padding_id
        return nn.functional.embedding(input_ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (input_ids,) = ctx.saved_tensors
        weight, (gradient,) = ctx.weight, gradients
        if ctx.padding_id is not None:  # torch gives this row no gradient
            gradient = gradient.masked_fill((input_ids == ctx.padding_id).unsqueeze(-1), 0)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_put_((input_ids,), gradient.to(weight.dtype), accumulate=True)
        return None, None, None
