"""The states of a weight update, against a model of what the engine really holds."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollwire.rollout.weight_states import Begin, Phase, WeightStates
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.v1 import weights_pb2


def version(step: int) -> weights_pb2.WeightVersion:
    return weights_pb2.WeightVersion(lineage="main", step=step)


def activate(states: WeightStates, step: int) -> None:
    assert states.begin(version(step)) is Begin.START
    states.verified()
    states.loading()
    states.loaded(b"digest%d" % step, b"digest%d" % step)


def test_an_update_passes_through_all_phases() -> None:
    states = WeightStates()
    assert not states.admits
    states.begin(version(1))
    assert states.phase is Phase.FETCHING and states.staging == version(1)
    states.verified()
    states.loading()
    served = states.loaded(b"x", b"x")
    assert served.version == version(1) and served.digest == b"x" and states.admits


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
    states.verified()
    states.loading()
    with pytest.raises(RollwireError) as caught:
        states.loaded(b"other", b"digest")
    assert caught.value.reason == Reason.WEIGHTS_CORRUPT
    assert states.active is None and not states.admits
    activate(states, 2)
    assert states.admits


class UpdateMachine(RuleBasedStateMachine):
    """The shell may fail anywhere; what serves is always exactly what the engine holds (I3)."""

    def __init__(self) -> None:
        super().__init__()
        self.states = WeightStates()
        self.engine: int | None = None  # step of the weights in the engine; None: none, or a mix

    def in_phase(self, phase: Phase) -> bool:
        return self.states.phase is phase

    @rule(step=st.integers(0, 3))
    def begin(self, step: int) -> None:
        staged, phase = self.states.staging, self.states.phase
        try:
            answer = self.states.begin(version(step))
        except RollwireError:
            assert staged is not None and staged != version(step)
            return
        if staged is not None:
            assert answer is Begin.JOIN and staged == version(step) and self.states.phase is phase
        elif self.states.active is not None and self.states.active.version == version(step):
            assert answer is Begin.ALREADY_ACTIVE and self.in_phase(Phase.IDLE)
        else:
            assert answer is Begin.START and self.in_phase(Phase.FETCHING)

    @precondition(lambda self: self.in_phase(Phase.FETCHING))
    @rule()
    def verify(self) -> None:
        self.states.verified()

    @precondition(lambda self: self.in_phase(Phase.DRAINING))
    @rule()
    def load(self) -> None:
        self.states.loading()
        self.engine = None

    @precondition(lambda self: self.in_phase(Phase.LOADING))
    @rule(intact=st.booleans())
    def finish(self, intact: bool) -> None:
        assert self.states.staging is not None
        step = self.states.staging.step
        if intact:
            self.engine = step
            self.states.loaded(b"%d" % step, b"%d" % step)
        else:
            with pytest.raises(RollwireError):
                self.states.loaded(b"broken", b"%d" % step)

    @precondition(lambda self: not self.in_phase(Phase.IDLE))
    @rule()
    def fail(self) -> None:
        before, phase = self.states.active, self.states.phase
        self.states.failed()
        assert self.in_phase(Phase.IDLE) and self.states.staging is None
        assert self.states.active == (None if phase is Phase.LOADING else before)

    @invariant()
    def what_serves_is_what_the_engine_holds(self) -> None:
        if self.states.active is not None:
            assert self.engine == self.states.active.version.step
            assert self.states.active.digest == b"%d" % self.engine
        if self.states.admits:
            assert self.states.active is not None

    @invariant()
    def staging_matches_phase(self) -> None:
        assert (self.states.staging is None) == self.in_phase(Phase.IDLE)


UpdateMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestUpdates = UpdateMachine.TestCase
