"""Adding up and averaging of metrics."""

from __future__ import annotations

import math

from rollwire.learner.metrics import average, combine, finite


def test_parts_of_a_step_add_up_and_extremes_stay() -> None:
    parts = [{"a": 1.0, "b_max": 2.0, "b_min": 2.0}, {"a": 3.0, "b_max": 1.0, "b_min": -1.0}]

    assert combine(parts) == {"a": 4.0, "b_max": 2.0, "b_min": -1.0}


def test_steps_are_averaged_and_extremes_stay() -> None:
    steps = [{"a": 1.0, "b_max": 2.0}, {"a": 3.0, "b_max": 5.0}]

    assert average(steps) == {"a": 2.0, "b_max": 5.0}
    assert average([]) == {}


def test_values_that_are_not_finite_are_left_out() -> None:
    assert finite({"a": 1.0, "b": math.inf, "c": math.nan}) == {"a": 1.0}
