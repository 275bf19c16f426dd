"""Training samples in memory, and how several become one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
class TokenBatch:
    """Sequences as a model takes them, and the N wanted predictions in them.

    Attributes:
        input_ids: int64[B, T].
        sources: int64[N]; position in the flattened [B * T] whose output predicts the target; by sequence, then
            position.
        targets: int64[N]; the predicted tokens.
        position_ids: int64[1, T] where sequences follow each other in one row, from 0 on for each; transformers lets
            no sequence see another then. None where each has a row of its own.
    """

    input_ids: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor | None = None

    @property
    def model_inputs(self) -> dict[str, Any]:
        """Arguments of a forward pass."""
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "use_cache": False}
        return inputs if self.position_ids is None else {**inputs, "position_ids": self.position_ids}


def lay_out(sequences: Sequence[ScoredSequence], device: torch.device, *, packed: bool) -> TokenBatch:
    """Lays sequences, which must have at least one target each, in rows of their own or all in one row."""
    return pack(sequences, device) if packed else pad(sequences, device)


def pack(sequences: Sequence[ScoredSequence], device: torch.device) -> TokenBatch:
    """Lays sequences one after another in one row; each must have at least one target."""
    lengths = [sequence.input_tokens for sequence in sequences]
    begins = np.cumsum([0, *lengths[:-1]])
    positions = [np.flatnonzero(sequence.loss_mask) for sequence in sequences]
    arrays = (
        np.concatenate([item.token_ids[:length] for item, length in zip(sequences, lengths, strict=True)])[None],
        np.concatenate([begin + wanted - 1 for begin, wanted in zip(begins, positions, strict=True)]),
        np.concatenate([item.token_ids[wanted] for item, wanted in zip(sequences, positions, strict=True)]),
        np.concatenate([np.arange(length) for length in lengths])[None],
    )
    return TokenBatch(*(torch.from_numpy(array).to(device) for array in arrays))


def pad(sequences: Sequence[ScoredSequence], device: torch.device) -> TokenBatch:
    """Lays sequences side by side, padded with token 0 on the right; each must have at least one target.

    Padding needs no attention mask: attention is causal, so that nothing to the right of a token can reach it.
    """
    width = max(sequence.input_tokens for sequence in sequences)
    input_ids = np.zeros((len(sequences), width), dtype=np.int64)
    sources, targets = [], []
    for row, sequence in enumerate(sequences):
        length = sequence.input_tokens
        input_ids[row, :length] = sequence.token_ids[:length]
        positions = np.flatnonzero(sequence.loss_mask)
        sources.append(row * width + positions - 1)
        targets.append(sequence.token_ids[positions])
    return TokenBatch(
        torch.from_numpy(input_ids).to(device),
        torch.from_numpy(np.concatenate(sources)).to(device),
        torch.from_numpy(np.concatenate(targets)).to(device),
    )


def at_targets(values: Sequence[NDArray[np.float32]], sequences: Sequence[ScoredSequence]) -> NDArray[np.float32]:
    """Returns float32[N]: per-position values of each sequence at its targets, ordered as `TokenBatch.targets`."""
    return np.concatenate([value[sequence.loss_mask] for value, sequence in zip(values, sequences, strict=True)])
