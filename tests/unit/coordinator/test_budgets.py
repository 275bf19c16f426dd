from __future__ import annotations

import pytest

from rollwire.coordinator.budgets import FailureBudget
from rollwire.coordinator.errors import RunError
from rollwire.v1 import trajectory_pb2

BOOM = trajectory_pb2.EpisodeFailure(
    reason=trajectory_pb2.FAILURE_REASON_ENVIRONMENT_ERROR, message="ZeroDivisionError:\n division by zero"
)


def test_only_failures_in_a_row_end_a_run() -> None:
    budget = FailureBudget(limit=2)
    for _ in range(3):
        budget.failed("group", [BOOM])
        budget.failed("group", [BOOM])
        budget.succeeded()


def test_the_text_names_the_reason_on_one_line() -> None:
    budget = FailureBudget(limit=1)
    budget.failed("g1", [BOOM])
    with pytest.raises(RunError) as error:
        budget.failed("g2 of FrozenLake", [BOOM])
    assert str(error.value).startswith(
        "2 groups in a row failed, the last one g2 of FrozenLake: environment_error: "
        "ZeroDivisionError: division by zero;"
    )
