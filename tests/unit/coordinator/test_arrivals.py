from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollwire.coordinator.arrivals import Arrival
from rollwire.coordinator.ledger_schema import GroupRecord, RunRecord
from rollwire.coordinator.ledger_store import LedgerError, LedgerStore
from rollwire.v1 import trajectory_pb2

Maker = Callable[..., trajectory_pb2.Trajectory]
RUN = RunRecord("run-1", "name", "run: {}", "2026-01-01T00:00:00+00:00", "/events", "/here")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LedgerStore]:
    store = LedgerStore(tmp_path / "run.db")
    store.create(RUN)
    yield store
    store.close()


def states(store: LedgerStore) -> list[tuple[str, bool]]:
    with sqlite3.connect(store.path) as reader:
        return reader.execute("SELECT state, record IS NULL FROM arrivals ORDER BY rowid").fetchall()


def record(items: list[trajectory_pb2.Trajectory]) -> GroupRecord:
    return GroupRecord("g00000000", 0, "FrozenLake", 7, 0, 1, items, [])


def test_an_id_arrives_once_and_what_waits_is_read_back(store: LedgerStore, make_trajectory: Maker) -> None:
    first, second = make_trajectory(episode=0, score=1.0), make_trajectory("g00000001", 0)
    assert store.add_arrival(Arrival(first, "task")) and not store.add_arrival(Arrival(first, "task"))
    assert store.add_arrival(Arrival(second))
    assert store.arrivals() == [Arrival(first, "task"), Arrival(second)]
    assert store.arrivals("FrozenLake", "g00000001") == [Arrival(second)]
    assert store.arrivals("Other", "g00000001") == []
    assert store.knows_arrival(first.trajectory_id) and not store.knows_arrival("else")


def test_two_trajectories_cannot_wait_at_one_place(store: LedgerStore, make_trajectory: Maker) -> None:
    store.add_arrival(Arrival(make_trajectory(attempt=0)))
    with pytest.raises(LedgerError):
        store.add_arrival(Arrival(make_trajectory(attempt=1)))
    store.end_arrivals("FrozenLake", "g00000000", "stale")
    assert store.add_arrival(Arrival(make_trajectory(attempt=1))), "the place of what was given up is free"
    assert states(store) == [("stale", 1), ("waiting", 0)]
    assert store.fate_of_group("FrozenLake", "g00000000") == "stale" and store.fate_of_group("x", "y") is None


def test_an_accepted_group_takes_its_arrivals_along(store: LedgerStore, make_trajectory: Maker) -> None:
    items = [make_trajectory(episode=episode) for episode in range(2)]
    for item in items:
        store.add_arrival(Arrival(item))
    store.accept_group(record(items), 0)
    assert states(store) == [("taken", 1)] * 2 and store.arrivals() == []
    assert not store.add_arrival(Arrival(items[0])), "I1: an id that was trained is still known"


def test_a_dropped_group_drops_what_it_had(store: LedgerStore, make_trajectory: Maker) -> None:
    store.add_arrival(Arrival(make_trajectory()))
    store.drop_group(record([]), "failed")
    assert states(store) == [("dropped", 1)]


def test_a_ledger_of_an_earlier_build_gets_the_table(tmp_path: Path, make_trajectory: Maker) -> None:
    path = tmp_path / "run.db"
    store = LedgerStore(path)
    store.create(RUN)
    store.close()
    with sqlite3.connect(path) as older:
        older.execute("DROP TABLE arrivals")
    store = LedgerStore(path)
    store.resume("run: {}")
    assert store.add_arrival(Arrival(make_trajectory()))
    store.close()
