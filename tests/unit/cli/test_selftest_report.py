"""What the figures of `rollwire selftest weights` are taken for."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from rollwire.cli.selftest_report import Report, Stage, diagnose
from rollwire.cli.selftest_weights import print_report
from rollwire.coordinator.logprob_gap import Bound
from rollwire.serving.config import RunConfig

OLD, NEW, OTHER = b"a" * 32, b"b" * 32, b"c" * 32


def stage(name: str, digest: bytes, usual: float = 1e-6, other: float = 1e-6, **fields: Any) -> Stage:
    gaps = {
        temperature: {f"actor/logprob_gap_{key}": value for key in ("mean", "max", "k3")}
        | {"actor/logprob_gap_tokens": 50.0}
        for temperature, value in ((1.0, usual), (0.7, other))
    }
    return Stage(name, digest=digest, **{"gaps": gaps, **fields})


def healthy(**changes: Any) -> Report:
    stages = [
        stage("version 0", OLD, received_bytes=1000),
        stage("after a step", NEW, received_bytes=900),
        stage("after a step at rate 0", NEW),
    ]
    return Report(**{"bound": Bound(1e-3, "here"), "stages": stages, "moved": 0.2, **changes})


def test_nothing_is_wrong() -> None:
    assert diagnose(healthy()) == ""


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([stage("version 0", OLD, fault="it holds something else", gaps={})], "version 0: it holds something else"),
        ([stage("version 0", OLD, 0.5, 0.5)], "another function: compare model.attention"),
        ([stage("version 0", OLD, 1e-6, 0.5)], "at temperature 0.7 alone"),
        ([stage("version 0", OLD, math.inf, 1e-6)], "at temperature 1 alone"),
        ([stage("version 0", OLD), stage("after a step", NEW, 0.1, 0.1)], "old weights, or with prefixes cached"),
        ([stage("version 0", OLD), stage("after a step", NEW, 1e-6, 0.1)], "old weights, or with prefixes cached"),
    ],
)
def test_the_first_stage_that_is_wrong_is_named(stages: list[Stage], said: str) -> None:
    text = diagnose(healthy(stages=stages))
    assert said in text and len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("second", "third", "moved", "said"),
    [
        (OLD, OLD, 0.2, "changed nothing"),
        (NEW, NEW, 0.0, "changed nothing"),
        (NEW, NEW, 2e-6, "too little to tell"),
        (NEW, OTHER, 0.2, "learning rate 0 changed the weights"),
    ],
)
def test_steps_must_change_the_weights_exactly_when_the_rate_is_not_0(
    second: bytes, third: bytes, moved: float, said: str
) -> None:
    stages = [stage("version 0", OLD), stage("after a step", second), stage("after a step at rate 0", third)]
    assert said in diagnose(healthy(stages=stages, moved=moved))


def test_an_update_without_changes_brings_nothing() -> None:
    stages = [stage("0", OLD), stage("1", NEW), stage("2", NEW, received_bytes=5)]
    assert "brought 5 bytes" in diagnose(healthy(stages=stages))


def printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_report(console, RunConfig(), report)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_fits_a_terminal_and_the_last_line_is_the_verdict() -> None:
    text = printed(healthy())
    assert "…" not in text
    assert "after a step at rate 0" in text and "1.0e-06" in text and "0.7" in text and "300 tokens" in text
    assert text.splitlines()[-1].startswith("OK")
    broken = printed(healthy(stages=[stage("version 0", OLD, fault="gone", gaps={})], moved=math.nan))
    assert broken.splitlines()[-1] == "FAILED  version 0: gone"
    assert "differs" in broken and "nan" not in broken
