"""When a gap between engine and learner ends a run."""

from __future__ import annotations

import math

import pytest

from rollwire.coordinator.errors import RunError
from rollwire.coordinator.logprob_gap import BOUNDS, MIN_TOKENS, Bound, GapAlarm, choose_bound


def scalars(mean: float | None, tokens: int = 200) -> dict[str, float]:
    found = {"actor/logprob_gap_tokens": float(tokens), "actor/logprob_gap_max": 9.0}
    return found if mean is None else {**found, "actor/logprob_gap_mean": mean}


def test_bounds_by_device_and_type() -> None:
    assert choose_bound("auto", ["cpu"], ["float32"]).nats == BOUNDS["cpu", "float32"]
    assert choose_bound("auto", ["cpu", "cpu"], ["float32", "bfloat16"]).nats == BOUNDS["cpu", "bfloat16"]
    assert choose_bound("auto", ["cuda", "npu"], ["bfloat16"]).nats == BOUNDS["npu", "bfloat16"]
    assert choose_bound("auto", ["xpu"], ["bfloat16"]).nats == BOUNDS["cuda", "bfloat16"]
    assert "npu in bfloat16" in choose_bound("auto", ["npu"], ["bfloat16"]).origin


def test_lower_precision_never_has_a_lower_bound() -> None:
    for device in ("cpu", "cuda", "npu"):
        assert 0 < BOUNDS[device, "float32"] < BOUNDS[device, "bfloat16"]


def test_a_configured_bound_comes_before_the_table_and_0_is_off() -> None:
    bound = choose_bound(0.2, ["cpu"], ["float32"])
    assert (bound.nats, bound.origin) == (0.2, "algorithm.max_logprob_gap")
    assert choose_bound(0, ["cpu"], ["float32"]).nats == math.inf
    GapAlarm(choose_bound(0, ["cpu"], ["float32"])).check(3, scalars(1e9))


def test_a_gap_within_the_bound_and_a_step_without_one_are_fine() -> None:
    alarm = GapAlarm(Bound(0.01, "here"))
    for step in range(100):
        alarm.check(step, scalars(0.01))
        alarm.check(step, {})


@pytest.mark.parametrize("mean", [0.011, math.inf, math.nan, None])
def test_a_larger_gap_ends_the_run_and_says_everything(mean: float | None) -> None:
    with pytest.raises(RunError) as caught:
        GapAlarm(Bound(0.01, "the default for cpu in float32")).check(3, scalars(mean))
    text = str(caught.value)
    assert text.startswith("step 3: engine and learner do not have the same policy")
    assert f"differ by {math.nan if mean is None else mean:.3g} nats" in text
    for part in ("200 tokens", "9 at most", "may be 0.01", "the default for cpu in float32"):
        assert part in text
    for part in ("prefix cache", "rollwire selftest weights", "algorithm.max_logprob_gap"):
        assert part in text
    assert all(line.startswith("  ") for line in text.splitlines()[1:])


def test_steps_with_few_tokens_are_added_up() -> None:
    alarm = GapAlarm(Bound(0.01, "here"))
    alarm.check(0, scalars(0.05, tokens=16))  # one token that is far off by rounding
    for step in range(1, MIN_TOKENS // 16):
        alarm.check(step, scalars(0.004, tokens=16))
    with pytest.raises(RunError, match="step 9") as caught:
        for step in range(8, 20):
            alarm.check(step, scalars(0.05, tokens=16))
    assert "32 tokens" in str(caught.value) and "differ by 0.05 nats" in str(caught.value)


def test_a_gross_gap_needs_few_tokens() -> None:
    with pytest.raises(RunError, match="16 tokens"):
        GapAlarm(Bound(0.01, "here")).check(0, scalars(2.0, tokens=16))
