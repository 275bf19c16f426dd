"""From protobuf to what the learner computes with. Every field is checked; errors name it by its path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rollwire.learner.losses import POLICY_LOSSES, Aggregation, LossSettings
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
MAX_TEMPERATURE: Final = 100.0
MAX_SAMPLE_ID_LENGTH: Final = 256

LOGPROB_TOLERANCE: Final = 1e-3
"""A log-probability may exceed 0 by this much: engines round."""

_AGGREGATIONS: Final = {
    learner_pb2.LOSS_AGGREGATION_UNSPECIFIED: Aggregation.TOKEN_MEAN,
    learner_pb2.LOSS_AGGREGATION_TOKEN_MEAN: Aggregation.TOKEN_MEAN,
    learner_pb2.LOSS_AGGREGATION_SEQUENCE_MEAN_TOKEN_MEAN: Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
    learner_pb2.LOSS_AGGREGATION_SEQUENCE_MEAN_TOKEN_SUM: Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
}


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
    return StepSettings(_parse_loss(header.loss), header.optimizer_steps, header.shuffle_seed)


def check_version(path: str, version: weights_pb2.WeightVersion) -> None:
    """Checks that a version is set and well formed.

    Raises:
        RollwireError: INVALID_ARGUMENT / `INVALID_FIELD`.
    """
    if not is_name(version.lineage):
        raise invalid_field(f"{path}.lineage", version.lineage, "[a-z0-9][a-z0-9_.-]{0,62} without '..'")


def parse_temperature(path: str, value: float) -> float:
    """Returns a temperature; 0 means 1.

    Raises:
        RollwireError: INVALID_ARGUMENT / `INVALID_FIELD`.
    """
    if not 0 <= value <= MAX_TEMPERATURE:  # NaN fails too
        raise invalid_field(path, value, f"a number > 0 up to {MAX_TEMPERATURE:g}, or 0 for 1")
    return value or 1.0


def _parse_loss(loss: learner_pb2.LossSettings) -> LossSettings:
    path = "header.loss"
    name = loss.policy_loss or "ppo_clip"
    if name not in POLICY_LOSSES:
        raise invalid_field(f"{path}.policy_loss", name, f"one of {', '.join(POLICY_LOSSES)}, or empty for ppo_clip")
    if not 0 <= loss.clip_low < 1:
        raise invalid_field(f"{path}.clip_low", loss.clip_low, "a number in [0, 1)")
    if not 0 <= loss.clip_high < math.inf:
        raise invalid_field(f"{path}.clip_high", loss.clip_high, "a finite number >= 0")
    if not 0 <= loss.entropy_coefficient < math.inf:
        raise invalid_field(f"{path}.entropy_coefficient", loss.entropy_coefficient, "a finite number >= 0")
    if loss.aggregation not in _AGGREGATIONS:
        names = ", ".join(learner_pb2.LossAggregation.keys())
        raise invalid_field(f"{path}.aggregation", loss.aggregation, f"one of {names}")
    return LossSettings(
        policy_loss=name,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        entropy_coefficient=loss.entropy_coefficient,
        aggregation=_AGGREGATIONS[loss.aggregation],
        temperature=parse_temperature(f"{path}.temperature", loss.temperature),
        recompute_old_logprobs=loss.recompute_old_logprobs,
    )


def parse_samples(samples: Sequence[learner_pb2.TrainSample], limits: SequenceLimits) -> list[Sample]:
    """Checks the samples of a training step and returns them as arrays.

    Raises:
        RollwireError: INVALID_ARGUMENT / `INVALID_FIELD`, with a path such as `samples[3].advantages`.
    """
    if not samples:
        raise invalid_field("samples", [], "at least one sample")
    seen: set[str] = set()
    return [_parse_sample(f"samples[{index}]", sample, limits, seen) for index, sample in enumerate(samples)]


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


def _parse_sample(path: str, sample: learner_pb2.TrainSample, limits: SequenceLimits, seen: set[str]) -> Sample:
    sequence = _parse_sequence(path, sample, limits, seen)
    if not sequence.targets:
        raise invalid_field(f"{path}.loss_mask", "all false", "true at one position or more, not counting position 0")
    length, trained = len(sequence.token_ids), sequence.loss_mask
    advantages = _values(f"{path}.advantages", sample.advantages, length, np.float32)
    _refuse(f"{path}.advantages", advantages, trained & ~np.isfinite(advantages), "finite where loss_mask is true")
    logprobs = _values(f"{path}.logprobs", sample.logprobs, length, np.float32)
    usable = np.isfinite(logprobs) & (logprobs <= LOGPROB_TOLERANCE)
    _refuse(f"{path}.logprobs", logprobs, trained & ~usable, "finite and <= 0 where loss_mask is true")
    return Sample(
        sequence.sample_id,
        sequence.token_ids,
        sequence.loss_mask,
        advantages,
        logprobs,
        comparable=sample.comparable_logprobs,
    )


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
