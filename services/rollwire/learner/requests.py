"""From protobuf to what the learner computes with. Every field is checked; errors name it by its path."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollwire.learner.loss_requests import parse_loss
from rollwire.learner.samples import Sample, ScoredSequence
from rollwire.learner.step import StepSettings
from rollwire.rpc.errors import RollwireError, invalid_field
from rollwire.rpc.ids import is_name
from rollwire.v1 import learner_pb2, weights_pb2

MAX_SAMPLES: Final = 65_536
"""Most samples of one batch."""

MAX_BATCH_TOKENS: Final = 1 << 26
"""Most tokens of one batch, about 1 GiB of memory."""

MAX_OPTIMIZER_STEPS: Final = 4096
MAX_SAMPLE_ID_LENGTH: Final = 256

PER_TOKEN_FIELDS: Final = (
    "token_ids",
    "loss_mask",
    "advantages",
    "logprobs",
    "reference_logprobs",
    "returns",
    "values",
)
"""Fields of a sample that have one value per token."""

LOGPROB_TOLERANCE: Final = 1e-3
"""A log-probability may exceed 0 by this much: engines round."""


@dataclass(frozen=True)
class SequenceLimits:
    """What a sequence may hold.

    Attributes:
        vocabulary_size: Valid token ids are 0 to this minus 1.
        max_tokens: Longest sequence.
    """

    vocabulary_size: int
    max_tokens: int


def parse_header(header: learner_pb2.TrainHeader) -> StepSettings:
    """Checks a header, apart from its fence, and returns what it asks for.

    Raises:
        RollwireError: INVALID_ARGUMENT / `INVALID_FIELD`.
    """
    check_version("header.base_version", header.base_version)
    if not 1 <= header.optimizer_steps <= MAX_OPTIMIZER_STEPS:
        raise invalid_field("header.optimizer_steps", header.optimizer_steps, f"1 to {MAX_OPTIMIZER_STEPS}")
    if header.freeze_policy and not header.train_critic:
        raise invalid_field("header.freeze_policy", True, "false without train_critic: nothing would be trained")
    loss = parse_loss("header.loss", header.loss)
    if loss.value_clip and not header.train_critic:
        raise invalid_field("header.loss.value_clip", loss.value_clip, "0 without train_critic, for it is the critic's")
    return StepSettings(
        loss, header.optimizer_steps, header.shuffle_seed, header.train_critic, freeze_policy=header.freeze_policy
    )


def needed_fields(settings: StepSettings) -> frozenset[str]:
    """Returns the optional fields of a sample that a step cannot do without."""
    needed = {
        "reference_logprobs": settings.loss.kl_coefficient > 0 and not settings.freeze_policy,
        "returns": settings.train_critic,
        "values": settings.train_critic and settings.loss.value_clip > 0,
    }
    return frozenset(name for name, is_needed in needed.items() if is_needed)


def check_version(path: str, version: weights_pb2.WeightVersion) -> None:
    """Checks that a version is set and well formed.

    Raises:
        RollwireError: INVALID_ARGUMENT / `INVALID_FIELD`.
    """
    if not is_name(version.lineage):
        raise invalid_field(f"{path}.lineage", version.lineage, "[a-z0-9][a-z0-9_.-]{0,62} without '..'")


def parse_samples(
    samples: Sequence[learner_pb2.TrainSample], limits: SequenceLimits, needed: Collection[str] = ()
) -> list[Sample]:
    """Checks the samples of a training step and returns them as arrays.

    Args:
        samples: As they came.
        limits: What a sequence may hold.
        needed: Optional fields that every sample must have, see `needed_fields`.

    Raises:
        RollwireError: INVALID_ARGUMENT / `INVALID_FIELD`, with a path such as `samples[3].advantages`.
    """
    if not samples:
        raise invalid_field("samples", [], "at least one sample")
    seen: set[str] = set()
    return [_parse_sample(f"samples[{index}]", sample, limits, seen, needed) for index, sample in enumerate(samples)]


def parse_sequences(samples: Sequence[learner_pb2.TrainSample], limits: SequenceLimits) -> list[ScoredSequence]:
    """Checks samples that are only scored: identifiers, tokens and masks.

    Raises:
        RollwireError: INVALID_ARGUMENT / `INVALID_FIELD`.
    """
    seen: set[str] = set()
    return [_parse_sequence(f"samples[{index}]", sample, limits, seen) for index, sample in enumerate(samples)]


def _parse_sequence(
    path: str, sample: learner_pb2.TrainSample, limits: SequenceLimits, seen: set[str]
) -> ScoredSequence:
    if not 1 <= len(sample.sample_id) <= MAX_SAMPLE_ID_LENGTH:
        raise invalid_field(f"{path}.sample_id", sample.sample_id, f"1 to {MAX_SAMPLE_ID_LENGTH} characters")
    if sample.sample_id in seen:
        raise invalid_field(f"{path}.sample_id", sample.sample_id, "an identifier that no other sample of the call has")
    seen.add(sample.sample_id)
    length = len(sample.token_ids)
    if not 2 <= length <= limits.max_tokens:
        raise invalid_field(
            f"{path}.token_ids",
            f"{length} tokens",
            f"2 to {limits.max_tokens} tokens, see max_sequence_tokens of GetInfo",
        )
    token_ids = np.fromiter(sample.token_ids, dtype=np.int64, count=length)
    outside = (token_ids < 0) | (token_ids >= limits.vocabulary_size)
    if outside.any():
        position = int(outside.argmax())
        raise invalid_field(
            f"{path}.token_ids[{position}]",
            int(token_ids[position]),
            f"0 to {limits.vocabulary_size - 1}, the model's vocabulary",
        )
    loss_mask = _values(f"{path}.loss_mask", sample.loss_mask, length, np.bool_)
    loss_mask[0] = False  # nothing predicts the first token
    return ScoredSequence(sample.sample_id, token_ids, loss_mask)


def _parse_sample(
    path: str, sample: learner_pb2.TrainSample, limits: SequenceLimits, seen: set[str], needed: Collection[str]
) -> Sample:
    sequence = _parse_sequence(path, sample, limits, seen)
    if not sequence.targets:
        raise invalid_field(f"{path}.loss_mask", "all false", "true at one position or more, not counting position 0")
    length, trained = len(sequence.token_ids), sequence.loss_mask
    advantages = _values(f"{path}.advantages", sample.advantages, length, np.float32)
    _refuse(f"{path}.advantages", advantages, trained & ~np.isfinite(advantages), "finite where loss_mask is true")
    return Sample(
        sequence.sample_id,
        sequence.token_ids,
        sequence.loss_mask,
        advantages,
        _logprobs(f"{path}.logprobs", sample.logprobs, trained),
        comparable=sample.comparable_logprobs,
        **{
            name: _optional(path, name, sample, trained, needed) for name in ("reference_logprobs", "returns", "values")
        },
    )


def _logprobs(path: str, values: Any, trained: NDArray[np.bool_]) -> NDArray[np.float32]:
    logprobs = _values(path, values, len(trained), np.float32)
    usable = np.isfinite(logprobs) & (logprobs <= LOGPROB_TOLERANCE)
    _refuse(path, logprobs, trained & ~usable, "finite and <= 0 where loss_mask is true")
    return logprobs


def _optional(
    path: str, name: str, sample: learner_pb2.TrainSample, trained: NDArray[np.bool_], needed: Collection[str]
) -> NDArray[np.float32] | None:
    """Returns an optional field; None when it is empty and not needed."""
    path, values = f"{path}.{name}", getattr(sample, name)
    if not values and name not in needed:
        return None
    if name == "reference_logprobs":
        return _logprobs(path, values, trained)
    found = _values(path, values, len(trained), np.float32)
    _refuse(path, found, trained & ~np.isfinite(found), "finite where loss_mask is true")
    return found


def _values(path: str, values: Any, length: int, dtype: type[np.generic]) -> NDArray[Any]:
    """Returns a repeated field as an array; it must be as long as the sample's token ids."""
    if len(values) != length:
        raise invalid_field(path, f"{len(values)} entries", f"as many as token_ids, {length}")
    return np.fromiter(values, dtype=dtype, count=length)


def _refuse(path: str, values: NDArray[np.float32], wrong: NDArray[np.bool_], allowed: str) -> None:
    if wrong.any():
        position = int(wrong.argmax())
        raise invalid_field(f"{path}[{position}]", float(values[position]), allowed)


def too_large(field: str, value: int, limit: int) -> RollwireError:
    """Returns the error for a batch that exceeds a limit of the learner."""
    return invalid_field(field, value, f"at most {limit} in one training step; send a smaller batch")
