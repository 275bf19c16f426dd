from __future__ import annotations

from rollwire.coordinator.wait_notice import WaitNotices


def look(notices: WaitNotices, now_s: float, *, waiting: bool = True, source: str = "agent") -> str:
    return notices.look("A", source, now_s, "127.0.0.1:7700", waiting=waiting)


def test_a_first_agent_is_missed_early_and_when_half_of_the_time_is_over() -> None:
    notices = WaitNotices(1800)
    told = {now_s: look(notices, 100.0 + now_s) for now_s in range(0, 3000, 5)}
    assert {now_s: text for now_s, text in told.items() if text} == {
        10: "no agent has asked for A yet: waiting up to timeouts.group_s=1800 s, 10 s of which are over; "
        "agents ask at 127.0.0.1:7700",
        900: "no agent has asked for A yet: waiting up to timeouts.group_s=1800 s, 900 s of which are over; "
        "agents ask at 127.0.0.1:7700",
    }


def test_who_came_before_is_missed_when_half_of_the_time_is_over() -> None:
    notices = WaitNotices(100)
    assert look(notices, 0.0) == ""
    notices.asked("A", 5.0)
    told = {now_s: look(notices, float(now_s)) for now_s in range(6, 100)}
    assert [now_s for now_s, text in told.items() if text] == [56]
    assert told[56].startswith("no agent has asked for A for 51 s: waiting up to")


def test_a_wait_that_is_over_is_forgotten() -> None:
    notices = WaitNotices(1800)
    look(notices, 0.0)
    look(notices, 9.0, waiting=False)
    assert look(notices, 11.0) == ""
    assert look(notices, 21.0) != ""


def test_pushers() -> None:
    notices = WaitNotices(20)
    look(notices, 0.0, source="pushed")
    text = look(notices, 5.0, source="pushed")
    assert text.startswith("nothing was pushed as A yet: waiting") and text.endswith("pushers send to 127.0.0.1:7700")
