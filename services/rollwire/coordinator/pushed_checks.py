"""Whether a pushed trajectory keeps the terms of the run. Pure. It comes from outside: nothing about it is believed.

Everything that the learner would refuse is refused here, so that one bad trajectory costs its sender an answer and not
the run its step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from rollwire.coordinator.intake import MAX_REWARD, ProtocolError, check_trajectory
from rollwire.rpc.ids import METRIC_PATTERN, is_name
from rollwire.rpc.limits import MIB
from rollwire.v1 import coordinator_pb2, trajectory_pb2

MAX_BYTES: Final = 4 * MIB
MAX_METRICS: Final = 256
MAX_SEED: Final = (1 << 63) - 1
LOGPROB_TOLERANCE: Final = 1e-3
"""A log-probability may exceed 0 by this much: engines round."""

_ID: Final = re.compile(r"[!-~]{1,128}")
_FLOAT32: Final = 1e-6
_MALFORMED: Final = coordinator_pb2.SUBMISSION_REJECTION_MALFORMED


class RejectedError(Exception):
    """A trajectory breaks a term.

    Attributes:
        rejection: Which.
        message: One line for people.
    """

    def __init__(self, rejection: coordinator_pb2.SubmissionRejection.ValueType, message: str) -> None:
        super().__init__(message)
        self.rejection = rejection
        self.message = message


@dataclass(frozen=True)
class Terms:
    """What the trajectories of one tag must be.

    Attributes:
        sampling: How tokens must be drawn.
        max_sequence_tokens: Longest sequence.
        vocabulary_size: Token ids are below this.
        tokenizer_hash: Of the tokenizer.
        template_hash: Of chat template and prompt templates.
    """

    sampling: trajectory_pb2.SamplingSettings
    max_sequence_tokens: int
    vocabulary_size: int
    tokenizer_hash: str
    template_hash: str


def check_identity(trajectory: trajectory_pb2.Trajectory) -> None:
    """Checks identifiers and size, without which nothing else can be told. Raises `RejectedError`."""
    size = trajectory.ByteSize()
    if size > MAX_BYTES:
        raise RejectedError(_MALFORMED, f"the trajectory has {size} bytes; allowed: at most {MAX_BYTES}")
    if _ID.fullmatch(trajectory.trajectory_id) is None:
        raise _malformed("trajectory_id", trajectory.trajectory_id, "1 to 128 printable ASCII characters, no blanks")
    if not is_name(trajectory.group_id):
        raise _malformed("group_id", trajectory.group_id, "[a-z0-9][a-z0-9_.-]{0,62} without '..'")
    if trajectory.environment_seed > MAX_SEED:
        raise _malformed("environment_seed", trajectory.environment_seed, f"at most {MAX_SEED}")


def check_terms(trajectory: trajectory_pb2.Trajectory, terms: Terms) -> None:
    """Checks everything that depends neither on other trajectories nor on time. Raises `RejectedError`."""
    _check_hashes(trajectory, terms)
    _check_sampling(trajectory.sampling, terms.sampling)
    # A field of a million tokens is not worth reading when a thousand are allowed.
    for position, sequence in enumerate(trajectory.sequences):
        if len(sequence.token_ids) > terms.max_sequence_tokens:
            raise RejectedError(
                coordinator_pb2.SUBMISSION_REJECTION_TOO_LONG,
                f"sequences[{position}] has {len(sequence.token_ids)} tokens; allowed: {terms.max_sequence_tokens}",
            )
    try:
        check_trajectory(trajectory, trajectory.group_id, trajectory.attempt, (trajectory.episode_index,))
    except ProtocolError as error:
        raise RejectedError(_MALFORMED, str(error)) from error
    for position, sequence in enumerate(trajectory.sequences):
        _check_sequence(f"sequences[{position}]", sequence, terms.vocabulary_size)
    _check_turns(trajectory)
    _check_metrics("metrics", trajectory.metrics)


def _check_hashes(trajectory: trajectory_pb2.Trajectory, terms: Terms) -> None:
    for name, rejection in (
        ("tokenizer_hash", coordinator_pb2.SUBMISSION_REJECTION_TOKENIZER),
        ("template_hash", coordinator_pb2.SUBMISSION_REJECTION_TEMPLATE),
    ):
        given, wanted = getattr(trajectory, name), getattr(terms, name)
        if given != wanted:
            raise RejectedError(rejection, f"{name} is {given[:80]!r}; the run has {wanted!r}")


def _check_sampling(given: trajectory_pb2.SamplingSettings, wanted: trajectory_pb2.SamplingSettings) -> None:
    """Checks that tokens were drawn from the distribution that is trained."""
    temperature = given.temperature if given.HasField("temperature") else 1.0
    if not math.isclose(temperature, wanted.temperature, rel_tol=_FLOAT32):
        raise _sampling("temperature", temperature, wanted.temperature)
    top_p = given.top_p if given.HasField("top_p") else 1.0
    if not math.isclose(top_p, wanted.top_p, rel_tol=_FLOAT32):
        raise _sampling("top_p", top_p, wanted.top_p)
    if given.top_k != wanted.top_k:
        raise _sampling("top_k", given.top_k, wanted.top_k)
    if given.logprob_mode != wanted.logprob_mode:
        names = [
            trajectory_pb2.LogprobMode.Name(mode) if mode in trajectory_pb2.LogprobMode.values() else mode
            for mode in (given.logprob_mode, wanted.logprob_mode)
        ]
        raise _sampling("logprob_mode", *names)


def _check_sequence(path: str, sequence: trajectory_pb2.TokenSequence, vocabulary_size: int) -> None:
    length = len(sequence.token_ids)
    if length < 2:
        raise _malformed(f"{path}.token_ids", f"{length} tokens", "at least 2")
    token_ids = np.fromiter(sequence.token_ids, dtype=np.int64, count=length)
    outside = (token_ids < 0) | (token_ids >= vocabulary_size)
    if outside.any():
        position = int(outside.argmax())
        raise _malformed(f"{path}.token_ids[{position}]", token_ids[position], f"0 to {vocabulary_size - 1}")
    mask = np.fromiter(sequence.loss_mask, dtype=bool, count=length)
    logprobs = np.fromiter(sequence.logprobs, dtype=np.float32, count=length)
    if not mask[1:].any():
        raise _malformed(f"{path}.loss_mask", "no sampled token after the first", "at least one")
    wrong = mask & ~(logprobs <= LOGPROB_TOLERANCE)
    if wrong.any():
        position = int(wrong.argmax())
        raise _malformed(f"{path}.logprobs[{position}]", logprobs[position], "at most 0")


def _check_turns(trajectory: trajectory_pb2.Trajectory) -> None:
    for position, turn in enumerate(trajectory.turns):
        path = f"turns[{position}]"
        if turn.index != position:
            raise _malformed(f"{path}.index", turn.index, f"{position}: turns are counted from 0, without gaps")
        length = len(trajectory.sequences[turn.sequence].token_ids)
        if not turn.prompt.begin <= turn.prompt.end <= turn.response.begin <= turn.response.end <= length:
            raise _malformed(path, "ranges out of order", "the prompt before the response, both within the sequence")
        if len(turn.observation_digest) not in (0, 32):
            raise _malformed(f"{path}.observation_digest", f"{len(turn.observation_digest)} bytes", "0 or 32 bytes")
        if abs(turn.reward) > MAX_REWARD:
            raise _malformed(f"{path}.reward", turn.reward, f"a number within ±{MAX_REWARD:g}")
        _check_metrics(f"{path}.metrics", turn.metrics)
    total = sum(turn.reward for turn in trajectory.turns)
    if not math.isclose(total, trajectory.score, rel_tol=_FLOAT32, abs_tol=_FLOAT32):
        raise _malformed("score", trajectory.score, f"the sum of the turns' rewards, {total:g}")


def _check_metrics(path: str, metrics: Mapping[str, float]) -> None:
    if len(metrics) > MAX_METRICS:
        raise _malformed(path, f"{len(metrics)} entries", f"at most {MAX_METRICS}")
    for name, value in metrics.items():
        if METRIC_PATTERN.fullmatch(name) is None:
            raise _malformed(path, name, "names of 1 to 128 characters A-Z a-z 0-9 _ . / -")
        if not math.isfinite(value):
            raise _malformed(f"{path}[{name!r}]", value, "a finite number")


def _sampling(name: str, value: object, wanted: object) -> RejectedError:
    return RejectedError(
        coordinator_pb2.SUBMISSION_REJECTION_SAMPLING,
        f"sampling.{name} is {value}; the run trains tokens drawn with {wanted}",
    )


def _malformed(path: str, value: object, allowed: str) -> RejectedError:
    shown = str(value)
    shown = shown if len(shown) <= 100 else shown[:100] + "…"
    return RejectedError(_MALFORMED, f"{path} is {shown!r}; allowed: {allowed}")
