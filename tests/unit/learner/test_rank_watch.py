"""How ranks learn of failures, over a real store."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import TCPStore

from rollwire.learner import rank_watch
from rollwire.learner.rank_watch import RankFailure, RankWatch, describe
from rollwire.learner.seats import Seat

LIMIT_S = 30.0
MakeWatch = Callable[..., tuple[RankWatch, "queue.Queue[RankFailure]"]]


@pytest.fixture
def make_watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeWatch]:
    """Returns a maker of watches of three ranks, with what each says."""
    monkeypatch.setattr(rank_watch, "LOOK_S", 0.02)
    monkeypatch.setattr(rank_watch, "CAUSE_WAIT_S", 0.3)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made: list[RankWatch] = []

    def make(
        rank: int, *, started: bool = True, **options: Callable[[], list[RankFailure]]
    ) -> tuple[RankWatch, queue.Queue[RankFailure]]:
        told: queue.Queue[RankFailure] = queue.Queue()
        watch = RankWatch(Seat(rank, 3, rank, "127.0.0.1", store.port, store_exists=True), told.put, **options)
        if started:
            watch.start()
        made.append(watch)
        return watch, told

    yield make
    for watch in made:
        watch.conclude()


def test_a_reported_cause_reaches_rank_0_and_its_verdict_all_others(make_watch: MakeWatch) -> None:
    first, told_first = make_watch(0)
    second, _ = make_watch(1)
    _, told_third = make_watch(2)
    second.report(describe(1, ValueError("weights are\n odd")))
    failure = told_first.get(timeout=LIMIT_S)
    assert str(failure) == "rank 1 of the learner failed: ValueError: weights are odd"
    first.conclude(failure)
    assert "weights are odd" in told_third.get(timeout=LIMIT_S).cause


def test_a_cause_goes_before_the_errors_that_follow_from_it(make_watch: MakeWatch) -> None:
    first, _ = make_watch(0)
    second, _ = make_watch(1)
    third, _ = make_watch(2)
    third.report(describe(2, RuntimeError("[gloo] Connection closed by peer")))
    own = describe(0, RuntimeError("gloo: Connection reset by peer"))
    assert own.consequence
    second.report(describe(1, MemoryError("no memory")))
    assert first.judge(own) == RankFailure(1, "MemoryError: no memory")


def test_a_killed_process_is_the_cause_of_errors_elsewhere(make_watch: MakeWatch) -> None:
    killed = RankFailure(2, "its process was killed by SIGKILL")
    first, told = make_watch(0, ended_processes=lambda: [killed])
    assert first.judge(describe(0, RuntimeError("Connection closed by peer"))) == killed
    assert told.get(timeout=LIMIT_S) == killed


def test_an_error_without_another_cause_is_its_own_cause(
    make_watch: MakeWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = make_watch(0)
    own = describe(0, RuntimeError("gloo: Connection closed by peer"))
    assert first.judge(own) == own
    monkeypatch.setattr(rank_watch.time, "sleep", lambda seconds: pytest.fail("there is nothing to wait for"))
    other = describe(0, KeyError("name"))
    assert first.judge(other) == other


def test_a_lost_connection_that_nothing_explains_ends_the_ranks_too(make_watch: MakeWatch) -> None:
    _, told = make_watch(0)
    second, _ = make_watch(1)
    second.report(describe(1, RuntimeError("gloo: Connection closed by peer")))
    assert told.get(timeout=LIMIT_S).rank == 1


def test_a_rank_that_stops_giving_signs_of_life_is_lost(make_watch: MakeWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank looks when the test says so, at the time that it says."""
    now = 1000.0
    first, second, third = (make_watch(rank, started=False)[0] for rank in range(3))
    monkeypatch.setattr(rank_watch.time, "monotonic", lambda: now)
    for alive in (True, True, True, False, False, False):
        assert (first._look(), second._look()) == (None, None)
        assert not alive or third._look() is None
        now += 0.4 * rank_watch.LOST_AFTER_S
    failure = first._look()
    assert failure is not None and failure.rank == 2
    assert failure.cause == "it gave no sign of life for 30 s"


def test_a_rank_that_has_not_come_yet_is_not_lost(make_watch: MakeWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    first, _ = make_watch(0, started=False)
    monkeypatch.setattr(rank_watch.time, "monotonic", lambda: now)
    for _ in range(5):
        assert first._look() is None
        now += rank_watch.LOST_AFTER_S


def test_an_empty_verdict_ends_the_others_without_an_error(make_watch: MakeWatch) -> None:
    first, _ = make_watch(0)
    _, told = make_watch(1)
    first.conclude()
    assert told.get(timeout=LIMIT_S).cause == ""
