"""`rollwire bench environment` with few sessions: every side plays, and the figures are what the windows say."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rollwire.cli.bench_environment import Finding, bench_environment
from rollwire.cli.bench_environment_sides import HOSTED, OPENENV, OPENENV_ON_LOOP, PLAY, PROVIDED, PROVIDED_UNARY, UNARY
from rollwire.serving.config import ConfigError

SIDES = ["bare unary echo", UNARY, PLAY, HOSTED, PROVIDED, PROVIDED_UNARY, OPENENV, OPENENV_ON_LOOP]
CROWD_SIDES = ["4 open, all play", "80 open, 4 play", "80 open, all play"]


def invoke(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(bench_environment)
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert shown.exit_code == 0
    return shown.output


def test_a_run_measures_every_side(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sizes = ["--sessions", "4", "--crowd", "80", "--seconds", "0.1", "--repetitions", "2"]
    output = invoke(*sizes, "--json", str(path))
    result = json.loads(path.read_text())
    assert list(result["sides"]) == [*SIDES, *CROWD_SIDES]
    assert all(len(windows) == 2 for windows in result["sides"].values())
    assert all(window["calls_per_s"] > 0 for windows in result["sides"].values() for window in windows)
    findings = {finding["name"]: finding for finding in result["findings"]}
    rates = {name: [window["calls_per_s"] for window in windows] for name, windows in result["sides"].items()}
    pairs = zip(rates[PLAY], rates[UNARY], strict=True)
    ratio = findings[f"{PLAY} / {UNARY}"]
    assert ratio["value"] == pytest.approx(statistics.median(play / unary for play, unary in pairs))
    assert ratio["target"] == 2.5 and ratio["reached"] == (ratio["value"] >= 2.5)
    assert 0.02 < findings["memory of the server with 80 sessions, GB"]["value"] < 1
    assert findings["import rollwire.client, s"]["value"] > 0
    for name in SIDES:
        assert name in output


def test_one_part_alone(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    output = invoke("--part", "import", "--json", str(path))
    result = json.loads(path.read_text())
    assert not result["sides"] and [finding["name"] for finding in result["findings"]] == ["import rollwire.client, s"]
    assert "target: at most 0.3" in output


@pytest.mark.parametrize(("value", "reached", "at_most_reached"), [(1.0, True, True), (0.9, False, True)])
def test_targets(value: float, reached: bool, at_most_reached: bool) -> None:
    assert Finding("x", value, 1.0).reached == reached
    assert Finding("x", value, 1.0, at_most=True).reached == at_most_reached


def test_a_part_that_there_is_not_is_one_line() -> None:
    with pytest.raises(ConfigError, match="--part is 'speed'; allowed: calls, openenv, crowd, import"):
        invoke("--part", "speed")


def test_without_openenv_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(ConfigError) as caught:
        invoke()
    assert "install rollwire[bench]" in str(caught.value)
    assert "--part calls --part crowd --part import" in str(caught.value)
