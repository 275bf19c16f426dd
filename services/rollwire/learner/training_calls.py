"""Which training call may do what: messages in order, steps executed once. Pure state machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc

from rollwire.learner.requests import MAX_BATCH_TOKENS, MAX_SAMPLES, PER_TOKEN_FIELDS, too_large
from rollwire.rpc.errors import Reason, RollwireError, invalid_field, precondition
from rollwire.rpc.versions import version_text
from rollwire.v1 import learner_pb2, weights_pb2

_RETRY_S: Final = 1.0


class BatchUpload:
    """The messages of one call: header, samples, commit, in this order and bounded in size.

    Attributes:
        samples: Samples received, in order.
    """

    def __init__(self) -> None:
        self.samples: list[learner_pb2.TrainSample] = []
        self._header: learner_pb2.TrainHeader | None = None
        self._commit: learner_pb2.TrainCommit | None = None
        self._tokens = 0

    def add(self, request: learner_pb2.TrainRequest) -> None:
        """Accepts the next message.

        Raises:
            RollwireError: INVALID_ARGUMENT / `INVALID_FIELD` for a message out of order or a batch that is too large.
        """
        part = request.WhichOneof("part")
        if part is None or self._commit is not None or (part == "header") != (self._header is None):
            raise invalid_field(
                "part", part or "not set", f"{self._expected()} here: header, then samples, then commit"
            )
        if part == "header":
            self._header = request.header
        elif part == "samples":
            self._append(request.samples)
        else:
            self._commit = request.commit

    @property
    def header(self) -> learner_pb2.TrainHeader:
        """The header; it is the first message that `add` accepts."""
        if self._header is None:
            raise invalid_field("part", "not set", "a header as the first message")
        return self._header

    def finish(self, digest: bytes) -> None:
        """Ends the call; `digest` is that of the samples received.

        Raises:
            RollwireError: INVALID_ARGUMENT / `INVALID_FIELD` without a commit, `DIGEST_MISMATCH` for a wrong one.
        """
        if self._commit is None:
            raise invalid_field("part", "not set", f"{self._expected()}, not the end of the stream")
        if self._commit.samples != len(self.samples) or self._commit.digest != digest:
            raise RollwireError(
                grpc.StatusCode.INVALID_ARGUMENT,
                Reason.DIGEST_MISMATCH,
                f"the commit announces {self._commit.samples} samples with digest {self._commit.digest.hex()[:16]}…, "
                f"arrived are {len(self.samples)} with digest {digest.hex()[:16]}…; send the batch again",
            )

    def _append(self, piece: learner_pb2.TrainSamples) -> None:
        # Fields that should be as long as the token ids are not checked yet, but take memory already.
        self._tokens += sum(max(len(getattr(sample, name)) for name in PER_TOKEN_FIELDS) for sample in piece.samples)
        if len(self.samples) + len(piece.samples) > MAX_SAMPLES:
            raise too_large("samples", len(self.samples) + len(piece.samples), MAX_SAMPLES)
        if self._tokens > MAX_BATCH_TOKENS:
            raise too_large("samples.token_ids", self._tokens, MAX_BATCH_TOKENS)
        self.samples.extend(piece.samples)

    def _expected(self) -> str:
        if self._header is None:
            return "a header"
        return "nothing" if self._commit is not None else "samples or a commit"


@dataclass(eq=False)
class Claim:
    """The right of one call to run a step; lost when a call of a newer coordinator arrives first.

    Attributes:
        epoch: Epoch of the coordinator that called.
        step: Number of the step, the version's `step` after it.
        computing: True once the batch is complete and the computation has begun.
        other_work: What is done instead of a step.
    """

    epoch: int
    step: int
    computing: bool = False
    other_work: str = ""


class TrainingCalls:
    """One step at a time, each executed once.

    Attributes:
        version: The present version.
    """

    def __init__(self, version: weights_pb2.WeightVersion) -> None:
        self.version = version
        self._claim: Claim | None = None
        self._last_digest = b""
        self._last_answer: learner_pb2.TrainResponse | None = None

    def open(self, header: learner_pb2.TrainHeader) -> Claim:
        """Claims the step that a header asks for.

        A call that is still sending its batch gives way to a coordinator with a higher epoch.

        Raises:
            RollwireError: ABORTED / `STEP_IN_PROGRESS`, FAILED_PRECONDITION / `WRONG_VERSION`.
        """
        held = self._claim
        if held is not None and (held.computing or header.fence.epoch <= held.epoch):
            raise _in_progress(held)
        base, present = header.base_version, self.version
        repeats_last = self._last_answer is not None and base.step + 1 == present.step
        if base.lineage != present.lineage or not (base.step == present.step or repeats_last):
            raise precondition(
                Reason.WRONG_VERSION,
                f"header.base_version is {version_text(base)}, the learner is at {version_text(present)}; "
                "a step starts from the learner's present version, as GetInfo gives it",
                base_version=version_text(base),
                version=version_text(present),
            )
        self._claim = Claim(header.fence.epoch, base.step + 1)
        return self._claim

    def begin(self, claim: Claim, digest: bytes) -> learner_pb2.TrainResponse | None:
        """Decides about a complete batch: None means that the caller now computes the step; else this is its answer.

        Raises:
            RollwireError: ABORTED / `FENCED` when another coordinator took over, FAILED_PRECONDITION / `STEP_CONFLICT`.
        """
        if claim is not self._claim:
            raise RollwireError(
                grpc.StatusCode.ABORTED,
                Reason.FENCED,
                f"epoch {claim.epoch} was replaced by a newer coordinator while it sent step {claim.step}; "
                "this coordinator must stop",
                metadata={"epoch": str(claim.epoch)},
            )
        if claim.step > self.version.step:
            claim.computing = True
            return None
        if digest != self._last_digest or self._last_answer is None:
            raise precondition(
                Reason.STEP_CONFLICT,
                f"step {claim.step} was committed with another batch (digest {self._last_digest.hex()[:16]}…, "
                f"now {digest.hex()[:16]}…); continue from {version_text(self.version)}",
                version=version_text(self.version),
            )
        answer = learner_pb2.TrainResponse()
        answer.CopyFrom(self._last_answer)
        answer.repeated_answer = True
        return answer

    def commit(self, claim: Claim, digest: bytes, answer: learner_pb2.TrainResponse) -> None:
        """Records the computed step: its version is the present one from now on."""
        self.version = answer.version
        self._last_digest, self._last_answer = digest, answer
        self.release(claim)

    def release(self, claim: Claim) -> None:
        """Gives a claim up, after an answer or an error; does nothing for one that is lost already."""
        if self._claim is claim:
            self._claim = None

    def hold(self, work: str) -> Claim:
        """Claims the learner for work between two steps, such as `a checkpoint is saved`; `release` must follow.

        Raises:
            RollwireError: ABORTED / `STEP_IN_PROGRESS`.
        """
        if self._claim is not None:
            raise _in_progress(self._claim)
        self._claim = Claim(0, self.version.step, computing=True, other_work=work)
        return self._claim

    def saved(self) -> dict[str, Any]:
        """Returns what `restore` needs, as JSON has it."""
        if self._last_answer is None:
            return {}
        return {"last_digest": self._last_digest.hex(), "last_answer": self._last_answer.SerializeToString().hex()}

    def restore(self, version: weights_pb2.WeightVersion, saved: Mapping[str, Any]) -> None:
        """Goes on from a version with the answer to its step, so that the step can be repeated once more."""
        self.restart(version)
        if saved:
            self._last_digest = bytes.fromhex(saved["last_digest"])
            self._last_answer = learner_pb2.TrainResponse.FromString(bytes.fromhex(saved["last_answer"]))

    def restart(self, version: weights_pb2.WeightVersion) -> None:
        """Begins another lineage; no step of the old one can be continued or repeated."""
        self.version = version
        self._last_digest, self._last_answer = b"", None


def _in_progress(held: Claim) -> RollwireError:
    return RollwireError(
        grpc.StatusCode.ABORTED,
        Reason.STEP_IN_PROGRESS,
        f"{held.other_work or _doing(held)}; ask again later",
        metadata={"step": str(held.step)},
        retry_after_s=_RETRY_S,
    )


def _doing(held: Claim) -> str:
    return f"step {held.step} is being {'computed' if held.computing else 'sent by another call'}"
