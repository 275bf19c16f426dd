"""Slots, the waiting line and chunks, driven as the decode loop drives them."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollwire.rollout.engine import GenerationRequest, Sampling
from rollwire.rollout.engines.scheduler import Generation, Scheduler
from rollwire.v1 import trajectory_pb2

STOP = 99


def generation(tokens: list[int], *, max_tokens: int = 2, limit: int = 100, cache_key: str = "") -> Generation:
    sampling = Sampling(1.0, 1.0, 0, max_tokens, frozenset({STOP}), trajectory_pb2.LOGPROB_MODE_SAMPLED)
    return Generation(GenerationRequest(tokens, sampling, 0, limit, cache_key))


def scheduler(slots: int = 2, budget: int = 8, *, alone: bool = False, keep_idle_s: float | None = 1.0) -> Scheduler:
    return Scheduler(slots, budget, one_sequence_per_pass=alone, keep_idle_s=keep_idle_s)


def run_pass(plan: Scheduler, now_s: float = 0.0, token: int = 1) -> list[tuple[int, int, int]]:
    """Computes one pass and draws `token` where it can; returns slot, begin and end of its chunks."""
    chunks = plan.next_pass(now_s)
    for chunk in chunks:
        plan.computed(chunk)
        if chunk.is_last:
            plan.drawn(chunk.generation, token, -0.5, now_s)
    return [(chunk.slot, chunk.begin, chunk.end) for chunk in chunks]


def finish(plan: Scheduler, now_s: float = 0.0) -> None:
    while plan.has_generations:
        assert run_pass(plan, now_s)


def test_prefill_then_one_token_per_pass() -> None:
    plan, one = scheduler(), generation([1, 2, 3])
    plan.submit(one)
    assert run_pass(plan) == [(0, 0, 3)]
    assert run_pass(plan) == [(0, 3, 4)]
    assert one.token_ids == [1, 1] and one.logprobs == [-0.5, -0.5]
    assert one.stop_reason == trajectory_pb2.STOP_REASON_MAX_TOKENS
    assert not plan.has_generations and run_pass(plan) == []


def test_stop_token_ends_and_is_part_of_the_output() -> None:
    plan, one = scheduler(), generation([1, 2], max_tokens=9)
    plan.submit(one)
    run_pass(plan, token=STOP)
    assert one.token_ids == [STOP] and one.stop_reason == trajectory_pb2.STOP_REASON_STOP_TOKEN


def test_length_limit_counts_the_prompt() -> None:
    plan, one = scheduler(), generation([1, 2], max_tokens=9, limit=4)
    plan.submit(one)
    finish(plan)
    assert len(one.token_ids) == 2 and one.stop_reason == trajectory_pb2.STOP_REASON_LENGTH_LIMIT


def test_long_prompts_are_computed_in_pieces_beside_others() -> None:
    plan = scheduler(budget=8)
    plan.submit(generation(list(range(11))))
    plan.submit(generation([1, 2, 3]))
    assert run_pass(plan) == [(0, 0, 8)]
    assert run_pass(plan) == [(1, 0, 3), (0, 8, 11)]
    assert run_pass(plan) == [(1, 3, 4), (0, 11, 12)]


def test_new_generations_are_admitted_while_others_run() -> None:
    plan = scheduler()
    plan.submit(generation([1, 2], max_tokens=5))
    run_pass(plan)
    plan.submit(generation([5, 6, 7]))
    assert sorted(run_pass(plan)) == [(0, 2, 3), (1, 0, 3)]


def test_the_line_waits_for_a_slot_in_order() -> None:
    plan = scheduler(slots=1)
    first, second, third = (generation([token]) for token in (1, 2, 3))
    for one in (first, second, third):
        plan.submit(one)
    finish(plan)
    assert all(len(one.token_ids) == 2 for one in (first, second, third))


def test_the_next_turn_computes_only_what_is_new() -> None:
    plan = scheduler(budget=100)
    plan.submit(generation([1, 2, 3], cache_key="a"))
    finish(plan)  # tokens 1 2 3 1 1, the last one not computed
    plan.submit(generation([1, 2, 3, 1, 1, 7, 8], cache_key="a"))
    assert run_pass(plan) == [(0, 4, 7)]


def test_a_prefix_that_changed_is_computed_from_the_change_on() -> None:
    plan = scheduler(budget=100)
    plan.submit(generation([1, 2, 3], cache_key="a"))
    finish(plan)
    plan.submit(generation([1, 2, 9, 1], cache_key="a"))
    assert run_pass(plan) == [(0, 2, 4)]


def test_the_same_prompt_again_computes_its_last_token() -> None:
    plan = scheduler(budget=100)
    plan.submit(generation([1, 2, 3], cache_key="a"))
    finish(plan)
    plan.submit(generation([1, 2, 3], cache_key="a"))
    assert run_pass(plan) == [(0, 2, 3)]


def test_release_and_new_weights_free_kept_slots() -> None:
    for free in (lambda plan: plan.release("a"), lambda plan: plan.forget_kept()):
        plan = scheduler(slots=1, keep_idle_s=None)
        plan.submit(generation([1, 2], cache_key="a"))
        finish(plan)
        plan.submit(generation([1, 2, 1, 1, 5], cache_key="b"))
        assert run_pass(plan) == [] and plan.wait_s(1e9) is None
        free(plan)
        assert run_pass(plan) == [(0, 0, 5)]


def test_an_idle_slot_is_taken_after_its_time_oldest_first() -> None:
    plan = scheduler(slots=2, keep_idle_s=1.0)
    for key, now_s in (("a", 0.0), ("b", 0.5)):
        plan.submit(generation([1, 2], cache_key=key))
        finish(plan, now_s)
    plan.submit(generation([7]))
    assert not plan.can_run(0.9) and run_pass(plan, 0.9) == []
    assert abs((plan.wait_s(0.9) or 0) - 0.1) < 1e-9
    assert plan.can_run(1.0) and run_pass(plan, 1.0) == [(0, 0, 1)]


def test_alone_means_one_sequence_per_pass_in_turn() -> None:
    plan = scheduler(alone=True)
    plan.submit(generation([1, 2]))
    plan.submit(generation([3, 4, 5]))
    assert [run_pass(plan) for _ in range(4)] == [[(0, 0, 2)], [(1, 0, 3)], [(0, 2, 3)], [(1, 3, 4)]]


def test_abort_frees_the_slot_and_keeps_what_was_drawn() -> None:
    plan, one = scheduler(slots=1), generation([1, 2], max_tokens=9, cache_key="a")
    waiting = generation([3])
    plan.submit(one)
    plan.submit(waiting)
    run_pass(plan)
    plan.abort(one)
    assert one.token_ids == [1] and one.stop_reason == trajectory_pb2.STOP_REASON_ABORTED
    plan.abort(one)
    finish(plan)
    assert len(waiting.token_ids) == 2


class SlotMachine(RuleBasedStateMachine):
    """Whatever happens, no slot is lost or given twice, and a slot's cache holds a prefix of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = Scheduler(3, 7, one_sequence_per_pass=False, keep_idle_s=2.0)
        self.now_s = 0.0
        self.submitted: list[Generation] = []
        self.stored: dict[int, list[int]] = {}

    @rule(key=st.sampled_from(["", "a", "b"]), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9))
    def submit(self, key: str, tokens: list[int]) -> None:
        one = generation(tokens, max_tokens=2, limit=20, cache_key=key)
        self.submitted.append(one)
        self.plan.submit(one)

    @rule(token=st.integers(0, 2))
    def compute(self, token: int) -> None:
        chunks = self.plan.next_pass(self.now_s)
        assert len({chunk.slot for chunk in chunks}) == len(chunks)
        assert sum(chunk.end - chunk.begin for chunk in chunks) <= 7
        assert bool(chunks) == bool(self.plan._running)
        for chunk in chunks:
            held = self.stored.setdefault(chunk.slot, [])
            # What the pass builds on was computed before, with exactly these tokens.
            assert held[: chunk.begin] == chunk.tokens[: chunk.begin]
            self.stored[chunk.slot] = chunk.tokens[: chunk.end]
            self.plan.computed(chunk)
            if chunk.is_last:
                self.plan.drawn(chunk.generation, token, -1.0, self.now_s)

    @rule(seconds=st.floats(0.1, 3))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        if self.submitted:
            self.plan.abort(self.submitted[pick % len(self.submitted)])

    @rule(key=st.sampled_from(["a", "b"]))
    def release(self, key: str) -> None:
        self.plan.release(key)

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        owners = [one.sequence.slot for one in self.plan._running.values() if one.sequence is not None]
        owners += [sequence.slot for sequence in self.plan._idle.values()] + self.plan._free
        assert sorted(owners) == [0, 1, 2]


SlotMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlots = SlotMachine.TestCase
