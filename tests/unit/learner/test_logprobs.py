"""Scores from hidden states equal plain ones, values and gradients, however they are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.utils._python_dispatch import TorchDispatchMode

from rollwire.learner.logprobs import Head, TokenScores, score_hidden

TOKENS, HIDDEN, VOCABULARY = 23, 16, 50
TEMPERATURE = 0.7


class AnotherLinear(torch.nn.Linear):
    """A head that is no plain linear one, for all that is known: its own forward pass has to be called."""


class Case:
    """Hidden states, targets and a head; the same arguments give the same numbers."""

    def __init__(self, kind: type[torch.nn.Linear] = torch.nn.Linear, bias: bool = True, **rescaling: Any) -> None:
        torch.manual_seed(3)
        self.head = Head(kind(HIDDEN, VOCABULARY, bias=bias), **rescaling)
        with torch.no_grad():
            self.head.project.weight.mul_(5)
        self.hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
        self.targets = torch.randint(VOCABULARY, (TOKENS,))

    @property
    def inputs(self) -> list[Tensor]:
        return [self.hidden, *self.head.project.parameters()]

    def plain(self) -> TokenScores:
        distribution = Categorical(logits=self.head(self.hidden).float() / TEMPERATURE)
        return TokenScores(distribution.log_prob(self.targets), distribution.entropy())

    def scored(self, chunk_tokens: int, **options: Any) -> TokenScores:
        return score_hidden(
            self.head,
            self.hidden,
            self.targets,
            TEMPERATURE,
            vocabulary=VOCABULARY,
            chunk_logits=chunk_tokens * VOCABULARY,
            **{"entropy_gradient": True, **options},
        )


def objective(found: TokenScores, entropies: float = 0.3) -> Tensor:
    value = (found.logprobs * torch.linspace(-1, 1, TOKENS)).sum()
    return value + entropies * found.entropies.sum() if entropies else value


RESCALINGS = [{}, {"bias": False}, {"multiplier": 0.25}, {"cap": 2.0}, {"cap": 2.0, "multiplier": 1.5}]


@pytest.mark.parametrize("chunk_tokens", [1, 4, 22, 23, 100])
@pytest.mark.parametrize("options", RESCALINGS, ids=str)
@pytest.mark.parametrize("kind", [torch.nn.Linear, AnotherLinear])
def test_scores_and_gradients_are_those_of_the_plain_distribution(
    kind: type[torch.nn.Linear], options: dict[str, Any], chunk_tokens: int
) -> None:
    case = Case(kind, **options)
    assert case.head.is_linear == (kind is torch.nn.Linear)

    found, plain = case.scored(chunk_tokens), case.plain()

    torch.testing.assert_close(found.logprobs, plain.logprobs, rtol=0, atol=3e-6)
    torch.testing.assert_close(found.entropies, plain.entropies, rtol=0, atol=3e-6)
    gradients = torch.autograd.grad(objective(found), case.inputs)
    for left, right in zip(gradients, torch.autograd.grad(objective(plain), case.inputs), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=2e-5)


@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_entropies_carry_no_gradient_unless_it_is_wanted(chunk_tokens: int) -> None:
    case = Case()

    found = case.scored(chunk_tokens, entropy_gradient=False)

    assert not found.entropies.requires_grad
    gradients = torch.autograd.grad(objective(found, entropies=0), case.inputs)
    for left, right in zip(
        gradients, torch.autograd.grad(objective(case.plain(), entropies=0), case.inputs), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=0, atol=2e-5)


@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_entropies_alone_give_a_gradient_too(chunk_tokens: int) -> None:
    case = Case()

    gradients = torch.autograd.grad(case.scored(chunk_tokens).entropies.sum(), case.inputs)

    for left, right in zip(gradients, torch.autograd.grad(case.plain().entropies.sum(), case.inputs), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=2e-5)


@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_gradients_are_added_to_those_that_are_there(chunk_tokens: int) -> None:
    case = Case()
    expected = torch.autograd.grad(objective(case.plain()), case.inputs)

    for _ in range(2):
        objective(case.scored(chunk_tokens, add_to_grad=True)).backward()

    for tensor, gradient in zip(case.inputs, expected, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad, 2 * gradient, rtol=0, atol=5e-5)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    case = Case()
    getattr(case.head.project, frozen).requires_grad_(False)

    objective(case.scored(4, add_to_grad=True)).backward()

    assert case.hidden.grad is not None
    assert [name for name, tensor in case.head.project.named_parameters() if tensor.grad is None] == [frozen]


def test_frozen_hidden_states_leave_the_head_its_gradient() -> None:
    case = Case()
    case.hidden.requires_grad_(False)

    objective(case.scored(4, add_to_grad=True)).backward()

    assert case.head.project.weight.grad is not None
    assert case.hidden.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_matrix_products_are_close_and_gradients_are_float32(dtype: torch.dtype) -> None:
    case = Case()
    expected = torch.autograd.grad(objective(case.plain()), case.inputs)

    with torch.autocast("cpu", dtype=dtype):
        found = case.scored(4, add_to_grad=True)
    objective(found).backward()

    assert found.logprobs.dtype == torch.float32
    for tensor, gradient in zip(case.inputs, expected, strict=True):
        assert tensor.grad is not None and tensor.grad.dtype == torch.float32
        assert 0 < (tensor.grad - gradient).abs().max() < 0.05 * gradient.abs().max()


class _Products(TorchDispatchMode):
    """Counts logits: results of matrix products that are as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and "mm" in str(func) and result.shape[-1] == VOCABULARY:
            self.tokens.append(len(result))
        return result


def _products(compute: Callable[[], object]) -> list[int]:
    with _Products() as products:
        compute()
    return products.tokens


@pytest.mark.parametrize("kind", [torch.nn.Linear, AnotherLinear])
def test_chunks_hold_no_more_logits_than_allowed(kind: type[torch.nn.Linear]) -> None:
    case = Case(kind)

    seen = _products(lambda: objective(case.scored(5)).backward())

    assert max(seen) == 5


def test_a_linear_head_computes_the_last_chunk_once_and_the_others_twice() -> None:
    assert _products(lambda: objective(Case().scored(TOKENS)).backward()) == [TOKENS]
    assert _products(lambda: objective(Case().scored(10)).backward()) == [10, 10, 3, 10, 10]


@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_scores_without_gradient_are_the_same(chunk_tokens: int) -> None:
    case = Case()
    with torch.no_grad():
        found, plain = case.scored(chunk_tokens), case.plain()

    assert not found.logprobs.requires_grad
    torch.testing.assert_close(found.logprobs, plain.logprobs, rtol=0, atol=3e-6)


def test_a_head_with_a_hook_is_called() -> None:
    case = Case()
    seen = []
    case.head.project.register_forward_hook(lambda module, arguments, output: seen.append(len(output)))

    case.scored(TOKENS)

    assert seen == [TOKENS]
