"""Log-probabilities and entropies of wanted tokens, without logits where none are wanted.

Hidden states are gathered at the wanted positions first and only those go through the head. A plain linear head goes
through `linear_head`. For any other head, when the logits of all tokens would be large, the tokens go through in chunks
whose logits are recomputed in the backward pass, so that at most one chunk of logits exists at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rollwire.learner.linear_head import LinearScores

CHUNK_LOGITS: Final = 1 << 25
"""Most logits (tokens x vocabulary) of a head that is not linear: 128 MiB in float32, a few times that in work."""

_LINEAR_CHUNK_LOGITS: Final = {"cpu": 1 << 26}
# Wide enough that adding to the gradient of a large matrix does not take longer than multiplying.
_LINEAR_CHUNK_LOGITS_ACCELERATOR: Final = 1 << 28


@dataclass(frozen=True)
class Head:
    """Maps hidden states [N, H] to logits [N, V]: a projection, and the rescaling that some architectures apply.

    Attributes:
        project: The output embedding.
        multiplier: Factor of its output.
        cap: Bound of the logits' size, approached by a hyperbolic tangent; None is none.
    """

    project: nn.Module
    multiplier: float = 1.0
    cap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns the logits."""
        logits: Tensor = self.project(hidden)
        if self.multiplier != 1:
            logits = logits * self.multiplier
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    @property
    def is_linear(self) -> bool:
        """Whether the projection is a matrix and a bias and nothing else; an adapter or a hook is something else."""
        module = self.project
        hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        return type(module) is nn.Linear and not hooks and "forward" not in vars(module)


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
    add_to_grad: bool = False,
    chunk_logits: int | None = None,
) -> TokenScores:
    """Returns the scores of target tokens from the hidden states that predict them.

    Args:
        head: Maps hidden states to logits.
        hidden_NH: Hidden states at the wanted positions.
        targets_N: Token ids.
        temperature: Divisor of the logits, > 0.
        vocabulary: Width V of the logits.
        entropy_gradient: Whether the entropies carry a gradient.
        add_to_grad: Let the backward pass add the gradients of a linear head to its parameters' `grad` itself; then
            `torch.autograd.grad` does not get them, and hooks on them are not called.
        chunk_logits: Most logits that exist at once; None chooses.
    """
    if not head.is_linear:
        return _score_any(head, hidden_NH, targets_N, temperature, vocabulary, entropy_gradient, chunk_logits)
    limit = chunk_logits or _LINEAR_CHUNK_LOGITS.get(hidden_NH.device.type, _LINEAR_CHUNK_LOGITS_ACCELERATOR)
    how = LinearScores(
        temperature, max(1, limit // vocabulary), head.multiplier, head.cap, entropy_gradient, add_to_grad
    )
    assert isinstance(head.project, nn.Linear)
    return TokenScores(*how(hidden_NH, head.project.weight, head.project.bias, targets_N))


def _score_any(
    head: Head,
    hidden_NH: Tensor,
    targets_N: Tensor,
    temperature: float,
    vocabulary: int,
    entropy_gradient: bool,
    chunk_logits: int | None,
) -> TokenScores:
    def score(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        scores = score_logits(head(hidden), targets, temperature, entropy_gradient=entropy_gradient)
        return scores.logprobs, scores.entropies

    chunk_tokens = max(1, (chunk_logits or CHUNK_LOGITS) // vocabulary)
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
