"""Lanes: order within one, the first error, bounds."""

from __future__ import annotations

import threading

import pytest

from rollwire.rpc.weight_lanes import INLINE_BYTES, Lane, Lanes


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_jobs_of_a_lane_run_in_order(threads: int) -> None:
    done: dict[int, list[int]] = {}
    with Lanes(threads, pending=2) as lanes:
        chosen = [lanes.lane(INLINE_BYTES) for _ in range(6)]
        for number in range(50):
            for at, lane in enumerate(chosen):
                lane.submit(done.setdefault(at, []).append, number)
        lanes.join()
    assert done == {at: list(range(50)) for at in range(6)}


def test_work_is_divided_by_bytes_and_small_tensors_stay_with_the_caller() -> None:
    with Lanes(2) as lanes:
        large = lanes.lane(10 * INLINE_BYTES)
        others = {lanes.lane(INLINE_BYTES) for _ in range(9)}
        assert len(others) == 1 and large not in others
        names: list[str] = []
        lanes.lane(INLINE_BYTES - 1).submit(lambda: names.append(threading.current_thread().name))
        assert names == [threading.current_thread().name]


@pytest.mark.parametrize("threads", [0, 1])
def test_the_first_error_is_raised_and_later_jobs_are_dropped(threads: int) -> None:
    done: list[int] = []

    def job(number: int) -> None:
        if number in (1, 2):
            raise KeyError(number)
        done.append(number)

    with Lanes(threads) as lanes:
        lane = lanes.lane(INLINE_BYTES)
        for number in range(4):
            lane.submit(job, number)
        for _ in range(2):
            with pytest.raises(KeyError, match="1"):
                lanes.join()
    assert done == [0]


def test_submitting_waits_while_too_many_jobs_are_pending() -> None:
    gate, submitted = threading.Event(), threading.Semaphore(0)

    def fill(lane: Lane) -> None:
        for _ in range(3):
            lane.submit(gate.wait, 30)
            submitted.release()

    with Lanes(1, pending=2) as lanes:
        filler = threading.Thread(target=fill, args=(lanes.lane(INLINE_BYTES),))
        filler.start()
        assert submitted.acquire(timeout=30) and submitted.acquire(timeout=30)
        assert not submitted.acquire(timeout=0.05)
        gate.set()
        assert submitted.acquire(timeout=30)
        filler.join()
        lanes.join()
