"""Log-probabilities and entropies of wanted tokens, without logits where none are wanted.

Hidden states are gathered at the wanted positions first and only those go through the head. When the logits of all of
them would be large, the tokens go through in chunks whose logits are recomputed in the backward pass, so that at most
one chunk of logits exists at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS: Final = 1 << 25
"""Most logits (tokens x vocabulary) that exist at once: 128 MiB in float32, a few times that while in work."""

Head = Callable[[Tensor], Tensor]
"""Maps hidden states [N, H] to logits [N, V]."""


@dataclass(frozen=True)
class TokenScores:
    """Scores of N tokens, float32[N] each.

    Attributes:
        logprobs: Natural-log probability of each token.
        entropies: Entropy in nats of the distribution that it was drawn from.
    """

    logprobs: Tensor
    entropies: Tensor


def score_logits(logits_NV: Tensor, targets_N: Tensor, temperature: float, *, entropy_gradient: bool) -> TokenScores:
    """Returns the scores of target tokens under softmax(logits / temperature), computed in float32.

    Args:
        logits_NV: Logits of any floating dtype.
        targets_N: Token ids.
        temperature: Divisor of the logits, > 0.
        entropy_gradient: Whether the entropies carry a gradient.
    """
    logp_NV = (logits_NV.float() / temperature).log_softmax(-1)
    logprobs_N = logp_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies_N = -(logp_NV.exp() * logp_NV).sum(-1)
    return TokenScores(logprobs_N, entropies_N)


def score_hidden(
    head: Head,
    hidden_NH: Tensor,
    targets_N: Tensor,
    temperature: float,
    *,
    vocabulary: int,
    entropy_gradient: bool,
    chunk_logits: int = CHUNK_LOGITS,
) -> TokenScores:
    """Returns the scores of target tokens from the hidden states that predict them.

    Args:
        head: Maps hidden states to logits.
        hidden_NH: Hidden states at the wanted positions.
        targets_N: Token ids.
        temperature: Divisor of the logits, > 0.
        vocabulary: Width V of the logits.
        entropy_gradient: Whether the entropies carry a gradient.
        chunk_logits: Most logits that exist at once.
    """

    def score(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        scores = score_logits(head(hidden), targets, temperature, entropy_gradient=entropy_gradient)
        return scores.logprobs, scores.entropies

    chunk_tokens = max(1, chunk_logits // vocabulary)
    if len(targets_N) <= chunk_tokens:
        return TokenScores(*score(hidden_NH, targets_N))
    parts = []
    chunks = zip(torch.split(hidden_NH, chunk_tokens), torch.split(targets_N, chunk_tokens), strict=True)
    for hidden, targets in chunks:
        if torch.is_grad_enabled():
            # Nothing random happens in a head, so there is no generator state to keep.
            parts.append(checkpoint(score, hidden, targets, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(score(hidden, targets))
    return TokenScores(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))
