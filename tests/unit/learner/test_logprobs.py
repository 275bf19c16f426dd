"""Chunked scores equal plain ones, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from rollwire.learner.logprobs import TokenScores, score_hidden

TOKENS, HIDDEN, VOCABULARY = 23, 16, 50


def scores(chunk_logits: int, *, entropy_gradient: bool = True) -> tuple[TokenScores, list[Tensor]]:
    torch.manual_seed(3)
    head = torch.nn.Linear(HIDDEN, VOCABULARY)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    found = score_hidden(
        head,
        hidden,
        targets,
        0.7,
        vocabulary=VOCABULARY,
        entropy_gradient=entropy_gradient,
        chunk_logits=chunk_logits,
    )
    objective = (found.logprobs * torch.linspace(-1, 1, TOKENS)).sum()
    if entropy_gradient:
        objective = objective + 0.3 * found.entropies.sum()
    gradients = torch.autograd.grad(objective, [hidden, head.weight, head.bias])
    return found, list(gradients)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 22])
@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_chunks_do_not_change_scores_or_gradients(chunk_tokens: int, entropy_gradient: bool) -> None:
    plain, plain_gradients = scores(TOKENS * VOCABULARY, entropy_gradient=entropy_gradient)
    chunked, chunked_gradients = scores(chunk_tokens * VOCABULARY, entropy_gradient=entropy_gradient)

    torch.testing.assert_close(chunked.logprobs, plain.logprobs, rtol=0, atol=1e-6)
    torch.testing.assert_close(chunked.entropies, plain.entropies, rtol=0, atol=1e-6)
    for left, right in zip(chunked_gradients, plain_gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-5)


def test_scores_are_those_of_the_tempered_distribution() -> None:
    torch.manual_seed(3)
    head = torch.nn.Linear(HIDDEN, VOCABULARY)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    distribution = Categorical(logits=head(hidden) / 0.7)

    found, _ = scores(5 * VOCABULARY)

    torch.testing.assert_close(found.logprobs, distribution.log_prob(targets), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.entropies, distribution.entropy(), rtol=0, atol=1e-6)


def test_chunks_hold_no_more_logits_than_allowed() -> None:
    largest = 0

    class Head(torch.nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            nonlocal largest
            largest = max(largest, hidden.shape[0] * VOCABULARY)
            return super().forward(hidden)

    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    found = score_hidden(
        Head(HIDDEN, VOCABULARY),
        hidden,
        targets,
        1.0,
        vocabulary=VOCABULARY,
        entropy_gradient=False,
        chunk_logits=5 * VOCABULARY,
    )
    found.logprobs.sum().backward()

    assert largest == 5 * VOCABULARY
