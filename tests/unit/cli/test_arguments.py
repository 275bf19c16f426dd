from __future__ import annotations

from pathlib import Path

import pytest

from rollwire.cli.arguments import split_arguments, split_run_arguments
from rollwire.cli.errors import user_errors
from rollwire.coordinator.errors import RunError
from rollwire.serving.config import ConfigError
from rollwire.serving.server import ServeError


def test_the_file_is_the_first_argument_without_an_equals_sign() -> None:
    assert split_arguments(["a.yaml", "run.seed=1"]) == (Path("a.yaml"), ["run.seed=1"])
    assert split_arguments(["run.seed=1", "b"]) == (None, ["run.seed=1", "b"])
    assert split_arguments(None) == (None, [])


def test_a_run_needs_a_file() -> None:
    with pytest.raises(ConfigError, match=r"CONFIG is missing; give a YAML file"):
        split_run_arguments(["run.seed=1"])


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError("a\nb"), 2), (RunError("a\nb"), 1), (ServeError("a\nb"), 1)]
)
def test_what_users_cause_is_a_line_each_and_a_status(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end, user_errors():
        raise error
    assert end.value.code == status
    assert capsys.readouterr().err == "error: a\nerror: b\n"


def test_the_end_of_a_log_belongs_to_the_line_above(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), user_errors():
        raise RunError("it ended:\n  last words")
    assert capsys.readouterr().err == "error: it ended:\n  last words\n"


def test_bugs_are_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), user_errors():
        raise ZeroDivisionError
