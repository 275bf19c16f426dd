"""What vLLM's processes print, and errors in one line, without vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from rollwire.rollout.engines.vllm_process import EngineOutput, one_line

_FAILING = """
(EngineCore pid=7) ERROR 10-01 10:00:00 [core.py:1] EngineCore failed to start.
(EngineCore pid=7) ERROR 10-01 10:00:00 [core.py:1] Traceback (most recent call last):
(EngineCore pid=7) ERROR 10-01 10:00:00 [core.py:1] ValueError: No common block size for 16
Process EngineCore:
RuntimeError: Engine core initialization failed. See root cause above.
"""


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_cause_is_found_and_everything_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    output = EngineOutput()
    with output.inherited():
        child = subprocess.Popen([sys.executable, "-c", f"import sys; sys.stderr.write({_FAILING!r}); print('last')"])
    assert child.wait() == 0
    wait_for(output.failure)
    assert output.failure() == "ValueError: No common block size for 16"
    passed_on = ""

    def complete() -> bool:
        nonlocal passed_on
        passed_on += capfd.readouterr().err
        return "last" in passed_on

    wait_for(complete)
    assert "EngineCore failed to start" in passed_on


def test_this_process_prints_where_it_did_before(capfd: pytest.CaptureFixture[str]) -> None:
    output = EngineOutput()
    with output.inherited():
        pass
    print("after")
    print("error", file=sys.stderr)
    captured = capfd.readouterr()
    assert "after" in captured.out
    assert "error" in captured.err
    assert output.failure() == ""


def test_only_the_end_is_remembered() -> None:
    output = EngineOutput()
    with output.inherited():
        child = subprocess.Popen([sys.executable, "-c", "print('KeyError: old'); [print(i) for i in range(2000)]"])
    child.wait()
    wait_for(lambda: output.tail and output.tail[-1] == "1999")
    assert output.failure() == ""


def test_output_goes_on_when_nobody_reads_what_is_passed_on() -> None:
    output = EngineOutput()
    reading, writing = os.pipe()
    gone, passed_on = os.pipe()
    os.close(gone)
    reader = threading.Thread(target=output._read, args=(reading, passed_on), daemon=True)
    reader.start()
    for _ in range(64):  # more than the pipe holds
        os.write(writing, b"x" * 4095 + b"\n")
    os.write(writing, b"ValueError: the last line\n")
    os.close(writing)
    reader.join(30)
    assert not reader.is_alive() and output.failure() == "ValueError: the last line"


def test_lines_without_an_end_do_not_add_up() -> None:
    output = EngineOutput()
    with output.inherited():
        code = "import sys; [sys.stderr.write('x' * 1000) for _ in range(4000)]; print('\\r 99%\\r100%\\rlast')"
        child = subprocess.Popen([sys.executable, "-c", code])
    assert child.wait() == 0
    wait_for(lambda: output.tail and output.tail[-1] == "last")
    assert output.tail[-3:] == [" 99%", "100%", "last"] and max(map(len, output.tail)) <= 2 << 16


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("first\nsecond"), "first"),
        (RuntimeError("\n  broken  \nmore"), "RuntimeError: broken"),
        (KeyError(), "KeyError: "),
        (
            ValueError("1 validation error for ModelConfig\n  Value error, too long [type=value_error, input=..."),
            "too long",
        ),
    ],
)
def test_one_line(error: Exception, expected: str) -> None:
    assert one_line(error) == expected
    assert len(one_line(ValueError("x" * 5000))) == 500
