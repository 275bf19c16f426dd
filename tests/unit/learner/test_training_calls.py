"""Order of messages in a training call, and steps that are executed once whatever the calls do."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from rollwire.learner import training_calls
from rollwire.learner.requests import PER_TOKEN_FIELDS
from rollwire.learner.training_calls import BatchUpload, Claim, TrainingCalls
from rollwire.rpc.digests import samples_digest
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1.learner_pb2 import TrainCommit, TrainHeader, TrainRequest, TrainResponse, TrainSample, TrainSamples
from rollwire.v1.weights_pb2 import WeightVersion

SAMPLES = [TrainSample(sample_id=name, token_ids=[1, 2]) for name in "abc"]


def request_of(part: str) -> TrainRequest:
    return {
        "header": TrainRequest(header=TrainHeader()),
        "samples": TrainRequest(samples=TrainSamples(samples=SAMPLES)),
        "commit": TrainRequest(commit=TrainCommit(samples=3, digest=samples_digest(SAMPLES))),
        "nothing": TrainRequest(),
    }[part]


def upload(parts: list[str]) -> BatchUpload:
    found = BatchUpload()
    for part in parts:
        found.add(request_of(part))
    found.finish(samples_digest(found.samples))
    return found


def test_header_samples_commit_is_an_upload() -> None:
    assert list(upload(["header", "samples", "commit"]).samples) == SAMPLES


@pytest.mark.parametrize(
    "parts",
    [
        [],
        ["nothing"],
        ["samples"],
        ["commit"],
        ["header"],
        ["header", "samples"],
        ["header", "header"],
        ["header", "samples", "header"],
        ["header", "samples", "commit", "samples"],
        ["header", "samples", "commit", "commit"],
    ],
)
def test_another_order_is_refused(parts: list[str]) -> None:
    with pytest.raises(RollwireError) as caught:
        upload(parts)
    assert caught.value.reason == Reason.INVALID_FIELD


@pytest.mark.parametrize(
    "commit",
    [
        TrainCommit(samples=2, digest=samples_digest(SAMPLES)),
        TrainCommit(samples=3, digest=samples_digest(SAMPLES[:2])),
        TrainCommit(samples=3),
    ],
)
def test_a_commit_that_does_not_fit_is_refused(commit: TrainCommit) -> None:
    found = BatchUpload()
    for part in (request_of("header"), request_of("samples"), TrainRequest(commit=commit)):
        found.add(part)

    with pytest.raises(RollwireError) as caught:
        found.finish(samples_digest(SAMPLES))

    assert caught.value.reason == Reason.DIGEST_MISMATCH
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(("limit", "value"), [("MAX_SAMPLES", 5), ("MAX_BATCH_TOKENS", 11)])
def test_a_batch_is_bounded(limit: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_calls, limit, value)
    found = BatchUpload()
    found.add(request_of("header"))
    found.add(request_of("samples"))

    with pytest.raises(RollwireError, match=f"at most {value}"):
        found.add(request_of("samples"))


@pytest.mark.parametrize("field", PER_TOKEN_FIELDS)
def test_every_field_counts_towards_the_bound(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_calls, "MAX_BATCH_TOKENS", 11)
    found = BatchUpload()
    found.add(request_of("header"))
    with pytest.raises(RollwireError, match="is 12; allowed: at most 11"):
        found.add(TrainRequest(samples=TrainSamples(samples=[TrainSample(sample_id="a", **{field: [1] * 12})])))


def header(step: int, epoch: int = 1, lineage: str = "line") -> TrainHeader:
    return TrainHeader(base_version={"lineage": lineage, "step": step}, fence={"run_id": "run", "epoch": epoch})


def at_step(step: int) -> TrainingCalls:
    return TrainingCalls(WeightVersion(lineage="line", step=step))


def run(calls: TrainingCalls, step: int, digest: bytes = b"one") -> TrainResponse:
    claim = calls.open(header(step))
    assert calls.begin(claim, digest) is None
    answer = TrainResponse(version=WeightVersion(lineage="line", step=step + 1), metrics={"m": float(step)})
    calls.commit(claim, digest, answer)
    return answer


def refused(call: Any, reason: Reason, code: grpc.StatusCode) -> RollwireError:
    with pytest.raises(RollwireError) as caught:
        call()
    assert (caught.value.reason, caught.value.code) == (reason, code)
    return caught.value


def test_a_repeat_of_the_latest_step_gets_the_first_answer() -> None:
    calls = at_step(0)
    first = run(calls, 0)

    claim = calls.open(header(0))
    again = calls.begin(claim, b"one")
    calls.release(claim)

    assert again is not None and again.repeated_answer and not first.repeated_answer
    assert (again.version, again.metrics) == (first.version, first.metrics)
    run(calls, 1)


def test_another_batch_for_the_latest_step_is_a_conflict() -> None:
    calls = at_step(0)
    run(calls, 0)
    claim = calls.open(header(0))

    refused(lambda: calls.begin(claim, b"two"), Reason.STEP_CONFLICT, grpc.StatusCode.FAILED_PRECONDITION)


@pytest.mark.parametrize(
    "wrong", [header(0), header(3), header(4), header(1, lineage="other"), header(2, lineage="other")]
)
def test_a_step_from_another_version_is_refused(wrong: TrainHeader) -> None:
    calls = at_step(0)
    run(calls, 0)
    run(calls, 1)

    refused(lambda: calls.open(wrong), Reason.WRONG_VERSION, grpc.StatusCode.FAILED_PRECONDITION)


def test_the_step_before_the_first_cannot_be_repeated() -> None:
    refused(lambda: at_step(5).open(header(4)), Reason.WRONG_VERSION, grpc.StatusCode.FAILED_PRECONDITION)


def test_one_call_at_a_time() -> None:
    calls = at_step(0)
    claim = calls.open(header(0))

    error = refused(lambda: calls.open(header(0)), Reason.STEP_IN_PROGRESS, grpc.StatusCode.ABORTED)
    assert error.retry_after_s is not None
    calls.release(claim)
    run(calls, 0)


def test_a_newer_coordinator_takes_over_from_one_that_is_sending() -> None:
    calls = at_step(0)
    old = calls.open(header(0, epoch=1))
    new = calls.open(header(0, epoch=2))

    refused(lambda: calls.begin(old, b"one"), Reason.FENCED, grpc.StatusCode.ABORTED)
    calls.release(old)
    assert calls.begin(new, b"two") is None


def test_a_newer_coordinator_waits_for_a_computation() -> None:
    calls = at_step(0)
    calls.begin(calls.open(header(0, epoch=1)), b"one")

    refused(lambda: calls.open(header(0, epoch=2)), Reason.STEP_IN_PROGRESS, grpc.StatusCode.ABORTED)


def test_a_failed_step_can_be_tried_again() -> None:
    calls = at_step(0)
    claim = calls.open(header(0))
    calls.begin(claim, b"one")
    calls.release(claim)

    run(calls, 0, b"two")


def test_other_work_and_steps_exclude_each_other() -> None:
    calls = at_step(0)
    claim = calls.open(header(0))
    refused(lambda: calls.hold("a checkpoint is being saved"), Reason.STEP_IN_PROGRESS, grpc.StatusCode.ABORTED)
    calls.release(claim)
    held = calls.hold("a checkpoint is being saved")
    error = refused(lambda: calls.open(header(0, epoch=9)), Reason.STEP_IN_PROGRESS, grpc.StatusCode.ABORTED)
    assert error.message == "a checkpoint is being saved; ask again later"
    calls.release(held)
    assert run(calls, 0).version.step == 1


def test_what_was_saved_repeats_the_last_answer() -> None:
    calls = at_step(4)
    answer = run(calls, 4)
    restored = at_step(0)
    restored.restore(calls.version, calls.saved())
    claim = restored.open(header(4))
    again = restored.begin(claim, b"one")
    assert again is not None and again.repeated_answer
    assert again.version == answer.version and dict(again.metrics) == dict(answer.metrics)
    fresh = at_step(0)
    fresh.restore(calls.version, at_step(3).saved())
    refused(lambda: fresh.open(header(4)), Reason.WRONG_VERSION, grpc.StatusCode.FAILED_PRECONDITION)


def test_nothing_of_an_abandoned_lineage_is_continued_or_repeated() -> None:
    calls = at_step(0)
    run(calls, 0)
    calls.restart(WeightVersion(lineage="next", step=0))

    for step in (0, 1):
        refused(lambda step=step: calls.open(header(step)), Reason.WRONG_VERSION, grpc.StatusCode.FAILED_PRECONDITION)
    assert calls.begin(calls.open(header(0, lineage="next")), b"one") is None


class StepsAreExecutedOnce(RuleBasedStateMachine):
    """Coordinators of any epoch send, repeat, abandon and complete steps in any order."""

    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.calls = at_step(0)
        self.computing: tuple[Claim, bytes] | None = None
        self.committed: list[bytes] = []

    @rule(target=claims, behind=st.integers(-2, 1), epoch=st.integers(1, 3))
    def open(self, behind: int, epoch: int) -> Claim | None:
        step = len(self.committed) + behind
        if step < 0:
            return None
        try:
            claim = self.calls.open(header(step, epoch))
        except RollwireError as error:
            assert error.reason in (Reason.STEP_IN_PROGRESS, Reason.WRONG_VERSION)
            return None
        assert self.computing is None
        assert behind == 0 or (behind == -1 and self.committed)
        return claim

    @rule(claim=consumes(claims), digest=st.sampled_from([b"one", b"two"]))
    def begin(self, claim: Claim | None, digest: bytes) -> None:
        if claim is None:
            return
        try:
            answer = self.calls.begin(claim, digest)
        except RollwireError as error:
            assert error.reason == Reason.FENCED or digest != self.committed[-1]
            self.calls.release(claim)
            return
        if answer is None:
            assert self.computing is None and claim.step == len(self.committed) + 1
            self.computing = (claim, digest)
        else:
            assert answer.repeated_answer and answer.version.step == claim.step == len(self.committed)
            assert digest == self.committed[-1]
            self.calls.release(claim)

    @rule(claim=consumes(claims))
    def caller_goes_away(self, claim: Claim | None) -> None:
        if claim is not None:
            self.calls.release(claim)

    @precondition(lambda self: self.computing is not None)
    @rule(success=st.booleans())
    def computation_ends(self, success: bool) -> None:
        assert self.computing is not None
        claim, digest = self.computing
        self.computing = None
        if success:
            self.committed.append(digest)
            version = WeightVersion(lineage="line", step=claim.step)
            self.calls.commit(claim, digest, TrainResponse(version=version))
        else:
            self.calls.release(claim)

    @invariant()
    def the_version_counts_committed_steps(self) -> None:
        assert self.calls.version.step == len(self.committed)


TestStepsAreExecutedOnce = StepsAreExecutedOnce.TestCase
TestStepsAreExecutedOnce.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
