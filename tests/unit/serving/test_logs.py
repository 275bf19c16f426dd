"""Logs: JSON off a terminal, control characters escaped, stack traces without the values of variables."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from rollwire.serving.logs import configure_logging, get_logger


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), _Terminal()], ids=["json", "terminal"])
def test_a_stack_trace_shows_no_values(stream: io.StringIO) -> None:
    configure_logging("rollout", stream=stream)
    secret = "hunter" + "2"
    try:
        raise ValueError(len(secret))
    except ValueError:
        get_logger("module").exception("failed")
    assert "test_a_stack_trace_shows_no_values" in stream.getvalue()
    assert secret not in stream.getvalue()


def test_lines_are_json_with_service_and_escaped_text() -> None:
    stream = io.StringIO()
    configure_logging("rollout", stream=stream)
    get_logger("module").info("said", text="\x1b[31mred\n")
    get_logger("module").debug("not written")
    (line,) = stream.getvalue().splitlines()
    assert "\x1b" not in line
    assert json.loads(line)["service"] == "rollout"
    assert json.loads(line)["text"] == "\x1b[31mred\n"


def test_a_full_disk_loses_lines_and_ends_nothing() -> None:
    stream = Path("/dev/full").open("a")  # noqa: SIM115 - closing it fails
    configure_logging("rollout", stream=stream)
    for number in range(1000):  # more than a buffer holds
        get_logger("module").error("lost", number=number)
    with pytest.raises(OSError, match="No space left"):
        stream.close()
