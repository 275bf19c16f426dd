"""Training samples in memory, and how several become one padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class ScoredSequence:
    """Token ids and the positions whose log-probabilities are wanted; L is the sequence's length.

    Attributes:
        sample_id: Identifier that the caller gave.
        token_ids: int64[L].
        loss_mask: bool[L]; position 0 is always False, for nothing predicts it.
    """

    sample_id: str
    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]

    @property
    def targets(self) -> int:
        """Number of positions whose log-probability is wanted."""
        return int(self.loss_mask.sum())

    @property
    def input_tokens(self) -> int:
        """Number of tokens that a forward pass needs: those before the last wanted one. What follows cannot matter."""
        wanted = np.flatnonzero(self.loss_mask)
        return int(wanted[-1]) if wanted.size else 0


@dataclass(frozen=True)
class Sample(ScoredSequence):
    """A sequence to train on.

    Attributes:
        advantages: float32[L]; read where `loss_mask` is true.
        logprobs: float32[L]; behaviour log-probabilities, read where `loss_mask` is true.
        comparable: Whether the present weights drew all of it from the distribution that the learner computes.
        reference_logprobs: float32[L] or None; log-probabilities of the reference, read where `loss_mask` is true.
        returns: float32[L] or None; what the critic is to predict, read where `loss_mask` is true.
        values: float32[L] or None; what the critic predicted before the step, read where `loss_mask` is true.
    """

    advantages: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    comparable: bool = False
    reference_logprobs: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class PaddedBatch:
    """Sequences side by side, padded on the right, and the N wanted predictions in them.

    Padding needs no attention mask: attention is causal, so that nothing to the right of a token can reach it.

    Attributes:
        input_ids: int64[B, T]; padding is token 0.
        sources: int64[N]; position in the flattened [B * T] whose output predicts the target; by row, then position.
        targets: int64[N]; the predicted tokens.
    """

    input_ids: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor


def pad(sequences: Sequence[ScoredSequence], device: torch.device) -> PaddedBatch:
    """Lays sequences side by side; each must have at least one target."""
    width = max(sequence.input_tokens for sequence in sequences)
    input_ids = np.zeros((len(sequences), width), dtype=np.int64)
    sources, targets = [], []
    for row, sequence in enumerate(sequences):
        length = sequence.input_tokens
        input_ids[row, :length] = sequence.token_ids[:length]
        positions = np.flatnonzero(sequence.loss_mask)
        sources.append(row * width + positions - 1)
        targets.append(sequence.token_ids[positions])
    return PaddedBatch(
        torch.from_numpy(input_ids).to(device),
        torch.from_numpy(np.concatenate(sources)).to(device),
        torch.from_numpy(np.concatenate(targets)).to(device),
    )


def at_targets(values: Sequence[NDArray[np.float32]], sequences: Sequence[ScoredSequence]) -> NDArray[np.float32]:
    """Returns float32[N]: per-position values of each sequence at its targets, ordered as `PaddedBatch.targets`."""
    return np.concatenate([value[sequence.loss_mask] for value, sequence in zip(values, sequences, strict=True)])
