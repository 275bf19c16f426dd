"""Log-probabilities and entropies straight from hidden states and the matrix of a linear head, in bounded memory.

Tokens go through in chunks, so that one buffer of logits exists at a time. It is turned into the gradient of the logits
in place; element-wise work runs over a few of its rows at a time, which on a CPU stay in the cache. The logits of the
last chunk are kept for the backward pass, which needs a buffer of that size anyway: when all tokens fit into one chunk
nothing is computed twice. The gradient of the matrix can go directly into its `grad`, without a tensor of its own.

With z the logits divided by the temperature, p = softmax(z) and H = -Σ p·log p: where g is the gradient of a token's
log-probability and e that of its entropy, the gradient of z_v is g·(1[v = target] - p_v) - e·p_v·(log p_v + H).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

_CACHED_LOGITS: Final = 1 << 20
_LAUNCHED_LOGITS: Final = 1 << 24
# Rows of the matrix's gradient that are computed at a time in a narrow type, to be added in float32.
_NARROW_ROWS: Final = 1 << 14


@dataclass(frozen=True)
class LinearScores:
    """How tokens are scored by logits = s·(h·Wᵀ + b), or c·tanh(s·(h·Wᵀ + b) / c).

    Attributes:
        temperature: Divisor of the logits, > 0.
        chunk_tokens: Most tokens whose logits exist at once.
        multiplier: s.
        cap: c; None is none.
        entropy_gradient: Whether the entropies carry a gradient.
        add_to_grad: Add the gradients of weight and bias, which must be leaves, to their `grad` and return none.
    """

    temperature: float
    chunk_tokens: int
    multiplier: float = 1.0
    cap: float | None = None
    entropy_gradient: bool = False
    add_to_grad: bool = False

    def __call__(
        self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities and entropies of the targets, float32[N] each.

        Matrix products have autocast's type where that is on; everything else is float32.
        """
        found: tuple[Tensor, Tensor] = _Scores.apply(  # type: ignore[no-untyped-call]
            hidden_NH, weight_VH, bias_V, targets_N, self, torch.is_grad_enabled()
        )
        return found

    def scaled(self, output: Tensor) -> Tensor:
        """Returns z for outputs of the linear map; it may be the very argument."""
        z = output.float()
        if self.cap is not None:
            return (z * (self.multiplier / self.cap)).tanh_().mul_(self.cap / self.temperature)
        factor = self.multiplier / self.temperature
        return z if factor == 1 else z * factor

    def unscaled_gradient(self, gradient: Tensor, z: Tensor) -> Tensor:
        """Returns the gradient of the linear map's outputs, given that of z, which it overwrites."""
        if self.cap is not None:  # d tanh(x) = (1 - tanh²(x)) dx
            gradient.mul_(1 - (z * (self.temperature / self.cap)).square_())
        factor = self.multiplier / self.temperature
        return gradient if factor == 1 else gradient.mul_(factor)


class _Scores(torch.autograd.Function):
    """See `LinearScores`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        how: LinearScores,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        kind = hidden_NH.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_VH.dtype
        with torch.autocast(kind, enabled=False):
            linear = _Linear(weight_VH, bias_V, dtype, min(how.chunk_tokens, len(targets_N)))
            per_token = [torch.empty(len(targets_N), device=hidden_NH.device) for _ in range(3)]
            for part in _pieces(len(targets_N), how.chunk_tokens):
                output = linear(hidden_NH[part])
                _score(output, targets_N[part], how, [values[part] for values in per_token])
        logprobs_N, entropies_N, normalisers_N = per_token
        ctx.save_for_backward(hidden_NH, targets_N, entropies_N, normalisers_N)
        ctx.weight, ctx.bias = weight_VH, bias_V  # the parameters themselves, whose `grad` may be added to
        ctx.how, ctx.dtype, ctx.kept = how, dtype, linear.buffer if differentiable else None
        if not how.entropy_gradient:
            ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, targets_N, entropies_N, normalisers_N = ctx.saved_tensors
        how: LinearScores = ctx.how
        of_logprobs_N, of_entropies_N = gradients
        if of_logprobs_N is None:
            of_logprobs_N = torch.zeros_like(normalisers_N)
        of_hidden = torch.empty_like(hidden_NH)
        of_weight = _Sum(ctx.weight, how.add_to_grad) if ctx.needs_input_grad[1] else None
        of_bias = _Sum(ctx.bias, how.add_to_grad) if ctx.needs_input_grad[2] else None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            linear = _Linear(ctx.weight, ctx.bias, ctx.dtype, min(how.chunk_tokens, len(targets_N)), ctx.kept)
            last_first = reversed(list(_pieces(len(targets_N), how.chunk_tokens)))
            for number, part in enumerate(last_first):
                hidden = hidden_NH[part].to(ctx.dtype)
                output = linear.buffer[: len(hidden)] if ctx.kept is not None and not number else linear(hidden)
                entropy = None if of_entropies_N is None else (of_entropies_N[part], entropies_N[part])
                _differentiate(output, targets_N[part], how, normalisers_N[part], of_logprobs_N[part], entropy)
                of_hidden[part] = output @ linear.weight
                if of_weight is not None:
                    of_weight.add_product(output.t(), hidden)
                if of_bias is not None:
                    of_bias.add(output.sum(0, dtype=torch.float32))
        ctx.kept = None
        results = [None if total is None else total.result for total in (of_weight, of_bias)]
        return of_hidden, *results, None, None, None


class _Linear:
    """The linear map, whose results are always in the same buffer.

    Attributes:
        weight: The matrix in the type of the products.
        buffer: Space for the results of `rows` hidden states.
    """

    def __init__(
        self, weight_VH: Tensor, bias_V: Tensor | None, dtype: torch.dtype, rows: int, buffer: Tensor | None = None
    ) -> None:
        self.weight = weight_VH.detach().to(dtype)
        self.buffer = self.weight.new_empty(rows, len(weight_VH)) if buffer is None else buffer
        self._bias = None if bias_V is None else bias_V.detach().to(dtype)

    def __call__(self, hidden: Tensor) -> Tensor:
        hidden, output = hidden.detach().to(self.weight.dtype), self.buffer[: len(hidden)]
        if self._bias is None:
            return torch.mm(hidden, self.weight.t(), out=output)
        return torch.addmm(self._bias, hidden, self.weight.t(), out=output)


class _Sum:
    """A parameter's gradient while it is added up in float32.

    Attributes:
        result: What autograd is given: nothing if the sum is in the parameter's `grad`.
    """

    def __init__(self, parameter: Tensor, add_to_grad: bool) -> None:
        present = parameter.grad if add_to_grad else None
        self._total = torch.zeros_like(parameter) if present is None else present
        if add_to_grad:
            parameter.grad = self._total
        self.result = None if add_to_grad else self._total

    def add(self, gradient: Tensor) -> None:
        self._total.add_(gradient)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        if left.dtype == self._total.dtype:
            self._total.addmm_(left, right)
            return
        for rows in _pieces(len(left), _NARROW_ROWS):
            self._total[rows].add_(left[rows] @ right)


def _score(output_NV: Tensor, targets_N: Tensor, how: LinearScores, results: list[Tensor]) -> None:
    """Writes log-probabilities, entropies and log Σ exp z of one chunk; leaves the chunk as it is."""
    for rows in _row_blocks(output_NV):
        z = how.scaled(output_NV[rows])
        highest = z.amax(-1, keepdim=True)
        x = z - highest
        weight = x.exp()
        total = weight.sum(-1)
        log_total = total.log()
        logprobs, entropies, normalisers = (values[rows] for values in results)
        torch.sub(x.gather(-1, targets_N[rows].unsqueeze(-1)).squeeze(-1), log_total, out=logprobs)
        torch.sub(log_total, weight.mul_(x).sum(-1).div_(total), out=entropies)
        torch.add(highest.squeeze(-1), log_total, out=normalisers)


def _differentiate(
    output_NV: Tensor,
    targets_N: Tensor,
    how: LinearScores,
    normalisers_N: Tensor,
    of_logprobs_N: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
) -> None:
    """Replaces a chunk by its gradient; `entropy` holds gradients and values of the entropies."""
    for rows in _row_blocks(output_NV):
        block, g = output_NV[rows], of_logprobs_N[rows].unsqueeze(-1)
        z = how.scaled(block)
        logp = torch.sub(z, normalisers_N[rows].unsqueeze(-1), out=z if how.cap is None else None)
        if entropy is None:
            gradient = logp.exp_().mul_(-g)
        else:
            e, value = (part[rows].unsqueeze(-1) for part in entropy)
            gradient = logp.exp().mul_(logp.add_(value).mul_(-e).sub_(g))
        gradient.scatter_add_(-1, targets_N[rows].unsqueeze(-1), g)
        block.copy_(how.unscaled_gradient(gradient, z))


def _row_blocks(output_NV: Tensor) -> Iterator[slice]:
    logits = _CACHED_LOGITS if output_NV.device.type == "cpu" else _LAUNCHED_LOGITS
    return _pieces(len(output_NV), max(1, logits // output_NV.shape[1]))


def _pieces(count: int, size: int) -> Iterator[slice]:
    return (slice(begin, min(begin + size, count)) for begin in range(0, count, size))
