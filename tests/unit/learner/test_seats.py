"""Which rank a process is."""

from __future__ import annotations

import pytest

from rollwire.learner.seats import Seat, find_seat
from rollwire.serving.server import ServeError

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_a_process_that_nobody_started_as_a_rank_has_no_seat() -> None:
    assert find_seat({"MASTER_PORT": "29500", "PATH": "/bin"}) is None


def test_the_variables_of_torchrun_are_read() -> None:
    assert find_seat(TORCHRUN) == Seat(5, 8, 1, "node-0", 29500, store_exists=True, attempt=2)


def test_without_an_agent_rank_0_serves_the_store_and_the_device_is_that_of_the_rank() -> None:
    four = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert find_seat(four) == Seat(5, 8, 5, "node-0", 29500, store_exists=False, attempt=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_PORT": ""}, "without MASTER_PORT"),
        ({"RANK": "8"}, "RANK is '8'; allowed: 0 to 7"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ServeError, match=message):
        find_seat({**TORCHRUN, **changes})
