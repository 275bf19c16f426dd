"""The states of a weight update, beside pauses and sleep, against a model of what the engine really holds."""

from __future__ import annotations

from typing import cast

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollwire.rollout.engine import Engine
from rollwire.rollout.policy import Hold, Policy
from rollwire.rollout.sleep_states import AWAKE, DISCARD, HOST, Level, Step
from rollwire.rollout.weight_states import Begin, Phase, WeightStates
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import weights_pb2


def version(step: int) -> weights_pb2.WeightVersion:
    return weights_pb2.WeightVersion(lineage="main", step=step)


def activate(states: WeightStates, step: int) -> None:
    assert states.begin(version(step)) is Begin.START
    reach(states, step, Phase.LOADING)
    states.loaded(version(step), b"digest%d" % step, b"digest%d" % step)


def reach(states: WeightStates, step: int, phase: Phase) -> None:
    """Takes an update that has begun to a phase."""
    for arrow in (states.verified, states.prepared, states.drained):
        if states.phase is not phase:
            arrow(version(step))
    assert states.phase is phase


def test_an_update_passes_through_all_phases() -> None:
    states = WeightStates()
    assert states.active is None
    states.begin(version(1))
    assert states.phase is Phase.FETCHING and states.staging == version(1)
    for arrow, phase in (
        (states.verified, Phase.PREPARING),
        (states.prepared, Phase.DRAINING),
        (states.drained, Phase.LOADING),
    ):
        arrow(version(1))
        assert states.phase is phase
        arrow(version(1))  # a repeat
        assert states.phase is phase
    served = states.loaded(version(1), b"x", b"x")
    assert served.version == version(1) and served.digest == b"x" and states.active is served
    assert states.loaded(version(1), b"x", b"x") is served


def test_arrows_of_a_version_that_serves_by_now_disturb_no_later_update() -> None:
    states = WeightStates()
    activate(states, 1)
    states.begin(version(2))
    for late in (states.verified, states.prepared, states.drained, states.failed):
        late(version(1))
    states.loaded(version(1), b"digest1", b"digest1")
    assert states.phase is Phase.FETCHING and states.staging == version(2)
    assert states.active is not None and states.active.version == version(1)


def test_an_arrow_of_a_version_that_nobody_began_is_a_bug() -> None:
    states = WeightStates()
    with pytest.raises(AssertionError):
        states.verified(version(1))
    states.begin(version(1))
    with pytest.raises(AssertionError):
        states.drained(version(1))


def test_the_active_version_needs_nothing_and_the_staged_one_is_joined() -> None:
    states = WeightStates()
    activate(states, 1)
    assert states.begin(version(1)) is Begin.ALREADY_ACTIVE
    assert states.begin(version(2)) is Begin.START
    assert states.begin(version(2)) is Begin.JOIN
    with pytest.raises(RollwireError) as caught:
        states.begin(version(3))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.ABORTED, Reason.UPDATE_IN_PROGRESS)


def test_an_older_version_may_be_activated_again() -> None:
    states = WeightStates()
    activate(states, 2)
    activate(states, 1)
    assert states.active is not None and states.active.version == version(1)


def test_a_load_whose_digest_differs_leaves_nothing_serving() -> None:
    states = WeightStates()
    activate(states, 1)
    states.begin(version(2))
    reach(states, 2, Phase.LOADING)
    with pytest.raises(RollwireError) as caught:
        states.loaded(version(2), b"other", b"digest")
    assert caught.value.reason == Reason.WEIGHTS_CORRUPT
    assert states.active is None
    activate(states, 2)
    assert states.active is not None


class ProtocolMachine(RuleBasedStateMachine):
    """Updates, pauses, sleep and checks in any order, with failures anywhere, against a model of the engine (I3).

    The model knows what the engine really holds, and that no step but the one that may is taken while something runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy(cast(Engine, None))
        self.states, self.sleep = self.policy.states, self.policy.sleep
        self.engine: int | None = None  # step of the weights in the engine; None: none, or a mix
        self.running: list[int] = []  # steps under which generations were admitted
        self.past = [version(0)]  # versions whose arrows may still come late

    def in_phase(self, *phases: Phase) -> bool:
        return self.states.phase in phases

    def staged(self) -> weights_pb2.WeightVersion:
        assert self.states.staging is not None
        return self.states.staging

    @rule(step=st.integers(0, 3))
    def begin(self, step: int) -> None:
        staged, phase, active = self.states.staging, self.states.phase, self.states.active
        try:
            answer = self.states.begin(version(step))
        except RollwireError as error:
            assert error.reason == Reason.UPDATE_IN_PROGRESS
            assert staged is not None and staged != version(step)
            return
        if staged is not None:
            assert answer is Begin.JOIN and staged == version(step) and self.states.phase is phase
        elif active is not None and active.version == version(step):
            assert answer is Begin.ALREADY_ACTIVE and self.in_phase(Phase.IDLE)
        else:
            assert answer is Begin.START and self.in_phase(Phase.FETCHING)
            self.past.append(version(step))

    @rule()
    def generate(self) -> None:
        if self.policy.admits:
            assert self.states.active is not None
            self.running.append(self.states.active.version.step)

    @precondition(lambda self: self.running)
    @rule()
    def end(self) -> None:
        self.running.pop()

    @precondition(lambda self: self.in_phase(Phase.FETCHING))
    @rule()
    def verify(self) -> None:
        self.states.verified(self.staged())

    @precondition(lambda self: self.in_phase(Phase.PREPARING) and self.sleep.awake)
    @rule()
    def shut(self) -> None:
        self.states.prepared(self.staged())
        self.policy.close_gate(Hold.UPDATE)

    @precondition(lambda self: self.in_phase(Phase.DRAINING))
    @rule(mode=st.sampled_from(["wait", "abort", "keep"]))
    def load(self, mode: str) -> None:
        if mode == "wait" and self.running:
            return  # not drained yet
        self.running.clear()
        self.states.drained(self.staged())
        self.engine = None

    @precondition(lambda self: self.in_phase(Phase.LOADING))
    @rule(intact=st.booleans())
    def finish(self, intact: bool) -> None:
        bringing = self.staged()
        if intact:
            self.engine = bringing.step
            self.states.loaded(bringing, b"%d" % bringing.step, b"%d" % bringing.step)
        else:
            with pytest.raises(RollwireError):
                self.states.loaded(bringing, b"broken", b"%d" % bringing.step)
        self.policy.open_gate(Hold.UPDATE)

    @precondition(lambda self: not self.in_phase(Phase.IDLE))
    @rule()
    def fail(self) -> None:
        before, phase, bringing = self.states.active, self.states.phase, self.staged()
        self.states.failed(bringing)
        self.policy.open_gate(Hold.UPDATE)
        assert self.in_phase(Phase.IDLE) and self.states.staging is None
        assert self.states.active == (None if phase is Phase.LOADING else before)

    @rule(late=st.data())
    def repeat(self, late: st.DataObject) -> None:
        """Every arrow that was taken may be taken again, by the version that serves or by the one being staged."""
        before = (self.states.active, self.states.phase, self.states.staging)
        if self.states.active is not None:
            served = self.states.active.version
            for arrow in (self.states.verified, self.states.prepared, self.states.drained):
                arrow(served)
            assert self.states.loaded(served, self.states.active.digest, b"") is self.states.active
        passed = max(self.states.phase.value - Phase.FETCHING.value, 0)
        for arrow in (self.states.verified, self.states.prepared, self.states.drained)[:passed]:
            arrow(self.staged())
        other = late.draw(st.sampled_from(self.past))
        if other != self.states.staging:
            self.states.failed(other)
        assert before == (self.states.active, self.states.phase, self.states.staging)

    @rule(shut=st.booleans())
    def pause(self, shut: bool) -> None:
        """Pause, and Resume or the end of its lease; repeated at will."""
        (self.policy.close_gate if shut else self.policy.open_gate)(Hold.PAUSE)
        assert not (shut and self.policy.admits)

    @rule(level=st.sampled_from([HOST, DISCARD]))
    def fall_asleep(self, level: Level) -> None:
        staging = self.states.staging is not None
        try:
            step = self.sleep.fall_asleep(level, staging=staging)
        except RollwireError as error:
            assert error.reason == (Reason.ASLEEP if self.sleep.level == DISCARD else Reason.UPDATE_IN_PROGRESS)
            return
        if step is Step.START:
            self.policy.close_gate(Hold.SLEEP)
            self.running.clear()
            if level == DISCARD:
                self.states.discard()
                self.engine = None

    @precondition(lambda self: self.sleep.towards in (HOST, DISCARD))
    @rule(lost=st.booleans())
    def asleep(self, lost: bool) -> None:
        if lost:
            self.engine = None
            self.sleep.lost()
            self.states.discard()
        else:
            self.sleep.asleep()

    @rule()
    def wake(self) -> None:
        self.sleep.wake()

    @precondition(lambda self: self.sleep.towards == AWAKE)
    @rule(memory=st.booleans())
    def awake(self, memory: bool) -> None:
        if memory:
            self.sleep.awakened()
            self.policy.open_gate(Hold.SLEEP)
        else:
            self.sleep.stays_asleep()

    @precondition(lambda self: self.states.active is not None and self.in_phase(Phase.IDLE) and self.sleep.awake)
    @rule()
    def changed(self) -> None:
        """A check found other weights in the engine than were loaded."""
        self.engine = None
        self.running.clear()
        self.states.discard()

    @invariant()
    def what_serves_is_what_the_engine_holds(self) -> None:
        if self.states.active is not None:
            assert self.engine == self.states.active.version.step
            assert self.states.active.digest == b"%d" % self.engine

    @invariant()
    def what_runs_is_of_the_version_in_the_engine(self) -> None:
        assert all(step == self.engine for step in self.running)

    @invariant()
    def nothing_is_admitted_while_something_holds_the_gate(self) -> None:
        if self.policy.admits:
            assert self.states.active is not None and not self.policy.holds
            assert self.in_phase(Phase.IDLE, Phase.FETCHING, Phase.PREPARING) and self.sleep.awake

    @invariant()
    def the_gate_opens_again(self) -> None:
        assert (Hold.UPDATE in self.policy.holds) == self.in_phase(Phase.DRAINING, Phase.LOADING)
        assert (Hold.SLEEP in self.policy.holds) == (not self.sleep.awake)
        if self.running and not self.policy.holds:
            assert self.policy.admits

    @invariant()
    def staging_matches_phase(self) -> None:
        assert (self.states.staging is None) == self.in_phase(Phase.IDLE)


ProtocolMachine.TestCase.settings = settings(max_examples=2_000, stateful_step_count=30, deadline=None)
TestProtocol = ProtocolMachine.TestCase
