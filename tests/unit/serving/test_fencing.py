"""A replaced coordinator changes nothing (I4)."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwire.rpc.errors import Reason, RollwireError
from rollwire.serving import fencing
from rollwire.serving.fencing import Fencing
from rollwire.v1 import trajectory_pb2


def fence(run_id: str = "run", epoch: int = 1) -> trajectory_pb2.Fence:
    return trajectory_pb2.Fence(run_id=run_id, epoch=epoch)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 5)), max_size=30))
def test_a_call_passes_exactly_if_no_higher_epoch_of_its_run_passed_before(calls: list[tuple[str, int]]) -> None:
    guard = Fencing()
    highest: dict[str, int] = {}
    for run_id, epoch in calls:
        if epoch >= highest.get(run_id, 0):
            guard.admit(fence(run_id, epoch))
            highest[run_id] = epoch
        else:
            with pytest.raises(RollwireError) as caught:
                guard.admit(fence(run_id, epoch))
            assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.ABORTED, Reason.FENCED)
            assert caught.value.metadata["current_epoch"] == str(highest[run_id])


@pytest.mark.parametrize(
    ("bad", "field"), [(fence(""), "fence.run_id"), (fence("../x"), "fence.run_id"), (fence(epoch=0), "fence.epoch")]
)
def test_malformed_fences_are_refused(bad: trajectory_pb2.Fence, field: str) -> None:
    with pytest.raises(RollwireError) as caught:
        Fencing().admit(bad)
    assert list(caught.value.fields) == [field]


def test_the_number_of_remembered_runs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencing, "_MAX_RUNS", 3)
    guard = Fencing()
    for run_id in ("a", "b", "c", "a", "d"):
        guard.admit(fence(run_id, 2))
    assert list(guard._epochs) == ["c", "a", "d"]
