"""Sleep, wake and weight updates together, against a model of what the engine really holds."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollwire.rollout.sleep_states import AWAKE, DISCARD, HOST, SleepStates, Step
from rollwire.rollout.weight_states import Begin, Phase, WeightStates
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import weights_pb2


def asleep(level: int) -> SleepStates:
    states = SleepStates()
    assert states.fall_asleep(level, staging=False) is Step.START
    states.asleep()
    return states


@pytest.mark.parametrize("level", [HOST, DISCARD])
def test_a_server_sleeps_and_wakes(level: int) -> None:
    states = SleepStates()
    assert states.awake and states.wake() is Step.NOTHING
    assert states.fall_asleep(level, staging=False) is Step.START
    assert not states.awake and states.level == AWAKE
    assert states.fall_asleep(level, staging=False) is Step.AFTER and states.wake() is Step.AFTER
    states.asleep()
    assert states.level == level and states.fall_asleep(level, staging=False) is Step.NOTHING
    assert states.wake() is Step.START and not states.awake
    states.awakened()
    assert states.awake


def test_what_is_kept_may_be_dropped_but_not_the_other_way() -> None:
    states = asleep(HOST)
    assert states.fall_asleep(DISCARD, staging=False) is Step.START
    states.asleep()
    with pytest.raises(RollwireError, match="cannot go back") as caught:
        states.fall_asleep(HOST, staging=False)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.ASLEEP)


def test_no_sleep_while_a_version_is_staged() -> None:
    states = SleepStates()
    with pytest.raises(RollwireError) as caught:
        states.fall_asleep(HOST, staging=True)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.ABORTED, Reason.UPDATE_IN_PROGRESS)
    assert caught.value.retry_after_s and states.awake
    assert asleep(HOST).fall_asleep(HOST, staging=True) is Step.NOTHING


def test_without_memory_it_stays_asleep_as_it_was() -> None:
    states = asleep(HOST)
    states.wake()
    states.stays_asleep()
    assert states.level == HOST and states.wake() is Step.START


@pytest.mark.parametrize("waking", [True, False])
def test_after_any_other_failure_the_weights_count_as_dropped(waking: bool) -> None:
    states = asleep(HOST) if waking else SleepStates()
    _ = states.wake() if waking else states.fall_asleep(HOST, staging=False)
    states.lost()
    assert states.level == DISCARD and states.wake() is Step.START


class SleepMachine(RuleBasedStateMachine):
    """The rules of `sleep.py` and `weights.py` around the two machines; anything may fail anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.sleep = SleepStates()
        self.weights = WeightStates()
        self.engine: int | None = None  # step of the weights that the engine could generate with
        self.host: int | None = None  # step of the weights that it has put into host memory
        self.memory = True  # whether the device's memory is taken

    def staged(self) -> weights_pb2.WeightVersion:
        assert self.weights.staging is not None
        return self.weights.staging

    # Sleeping

    @rule(level=st.sampled_from([HOST, DISCARD]))
    def fall_asleep(self, level: int) -> None:
        before, towards = self.sleep.level, self.sleep.towards
        try:
            step = self.sleep.fall_asleep(level, staging=self.weights.staging is not None)
        except RollwireError as error:
            assert towards is None
            assert (error.reason == Reason.ASLEEP) == (before > level)
            return
        if step is Step.START:
            assert self.weights.phase is Phase.IDLE, "an update must not meet an engine that falls asleep"
            if level == DISCARD:
                self.weights.discard()
        else:
            assert self.sleep.towards == towards and self.sleep.level == before

    @precondition(lambda self: self.sleep.towards in (HOST, DISCARD))
    @rule(works=st.booleans())
    def end_of_falling_asleep(self, works: bool) -> None:
        level = self.sleep.towards
        if works:
            self.host = None if level == DISCARD else (self.engine if self.memory else self.host)
            self.engine, self.memory = None, False
            self.sleep.asleep()
        else:
            self.engine = self.host = None
            self.memory = False
            self.sleep.lost()
            self.weights.discard()

    @rule()
    def wake(self) -> None:
        before = self.sleep.level
        step = self.sleep.wake()
        assert (step is Step.NOTHING) <= (before == AWAKE)

    @precondition(lambda self: self.sleep.towards == AWAKE)
    @rule(end=st.sampled_from(["works", "no memory", "breaks"]))
    def end_of_waking(self, end: str) -> None:
        before = self.sleep.level
        if end == "works":
            self.engine, self.memory = self.host, True
            self.sleep.awakened()
        elif end == "no memory":
            self.sleep.stays_asleep()
            assert self.sleep.level == before
        else:
            self.host = None
            self.sleep.lost()
            self.weights.discard()

    # Updates

    @rule(step=st.integers(0, 3))
    def begin(self, step: int) -> None:
        try:
            answer = self.weights.begin(weights_pb2.WeightVersion(lineage="main", step=step))
        except RollwireError:
            return
        if answer is Begin.ALREADY_ACTIVE and self.sleep.awake:
            assert self.engine == step

    @precondition(lambda self: self.weights.phase is Phase.FETCHING)
    @rule()
    def fetched(self) -> None:
        try:
            self.sleep.require_awake("UpdateWeights again")
        except RollwireError as error:
            assert error.reason == Reason.ASLEEP
            self.weights.failed(self.staged())
        else:
            self.weights.verified(self.staged())

    @precondition(lambda self: self.weights.phase is Phase.PREPARING)
    @rule()
    def prepare(self) -> None:
        assert self.sleep.awake and self.memory
        self.weights.prepared(self.staged())

    @precondition(lambda self: self.weights.phase is Phase.DRAINING)
    @rule()
    def load(self) -> None:
        assert self.sleep.awake and self.memory
        self.weights.drained(self.staged())
        self.engine = None

    @precondition(lambda self: self.weights.phase is Phase.LOADING)
    @rule(intact=st.booleans())
    def loaded(self, intact: bool) -> None:
        assert self.sleep.awake and self.memory and self.weights.staging is not None
        if intact:
            self.engine = self.weights.staging.step
            self.weights.loaded(self.staged(), b"digest", b"digest")
        else:
            self.weights.failed(self.staged())

    @invariant()
    def what_serves_is_what_the_engine_holds(self) -> None:
        if self.sleep.awake and self.weights.active is not None:
            assert self.memory and self.engine == self.weights.active.version.step

    @invariant()
    def dropped_weights_serve_nothing(self) -> None:
        if self.sleep.level == DISCARD:
            assert self.weights.active is None


SleepMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestSleepAndUpdates = SleepMachine.TestCase
