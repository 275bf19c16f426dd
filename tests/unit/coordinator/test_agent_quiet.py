from __future__ import annotations

from rollwire.coordinator.agent_quiet import QuietNotice, QuietSession


def test_a_stall_is_told_once_in_thirty_seconds() -> None:
    notice = QuietNotice()
    dead = [QuietSession("A", 40.0, 60.0), QuietSession("A", 35.0, 60.0), QuietSession("B", 30.0, 600.0)]
    alive = QuietSession("A", 0.0, 60.0)
    text = notice.look(100.0, None, [*dead, alive])
    assert text.startswith(
        "2 sessions of A have made no call for 35 s; unless one comes, the first is given up in 20 s"
    )
    assert "; 1 session of B has made no call for 30 s; unless one comes, the first is given up in 570 s" in text
    assert notice.look(129.9, None, dead) == ""
    assert notice.look(130.0, None, dead) != ""


def test_nothing_is_told_while_the_run_goes_on() -> None:
    notice = QuietNotice()
    assert notice.look(100.0, 71.0, [QuietSession("A", 500.0, 600.0)]) == "", "a result came 29 s ago"
    assert notice.look(100.0, None, [QuietSession("A", 29.9, 600.0)]) == ""
    assert notice.look(100.0, None, []) == ""
    assert notice.look(101.0, 71.0, [QuietSession("A", 500.0, 600.0)]) != "", "nothing was told before"
