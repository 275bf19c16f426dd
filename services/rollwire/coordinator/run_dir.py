"""The directory of one run: `<output_dir>/runs/<name>/<timestamp>`, and where its event file goes."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from rollwire.coordinator.errors import RunError
from rollwire.coordinator.journal import count_steps
from rollwire.coordinator.ledger_schema import FORMAT_VERSION
from rollwire.serving.config import RunConfig
from rollwire.serving.config.loader import dump_config
from rollwire.serving.places import require_writable

CONFIG_FILE: Final = "config.yaml"
LEDGER_FILE: Final = "run.db"
LOG_DIR: Final = "logs"
ADDRESS_FILE: Final = "coordinator.json"
_MAX_RUNS_PER_SECOND: Final = 100


@dataclass(frozen=True)
class RunDir:
    """Places of one run.

    Attributes:
        path: Directory of the run: `config.yaml`, `run.db`, `metrics.jsonl`, `logs/`, and what the learner exports.
        event_dir: Directory of the TensorBoard event file; made with the first value.
        created: When, with time zone.
    """

    path: Path
    event_dir: Path
    created: datetime

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / CONFIG_FILE

    @property
    def log_dir(self) -> Path:
        """Directory of log files."""
        return self.path / LOG_DIR

    @property
    def address_file(self) -> Path:
        """Where the coordinator can be reached while the run goes on."""
        return self.path / ADDRESS_FILE

    def remove(self) -> None:
        """Removes the directory of a run that recorded nothing, and those above it that are empty then."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # there are other runs
            self.path.parent.rmdir()
            self.path.parent.parent.rmdir()


def create_run_dir(config: RunConfig, now: datetime) -> RunDir:
    """Makes the directory of a new run, complete with its configuration and log directory, or nothing at all.

    Args:
        config: The validated configuration.
        now: Present time, with time zone; names the directory.

    Raises:
        RunError: It cannot be written.
    """
    parent = Path(config.run.output_dir).absolute() / "runs" / config.run.name
    try:
        parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
        try:
            (partial / LOG_DIR).mkdir()
            (partial / CONFIG_FILE).write_text(dump_config(config), encoding="utf-8")
            partial.chmod(0o755)
            path = _rename_to_free_name(partial, parent, now.strftime("%Y%m%d-%H%M%S"))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise RunError(
            f"run.output_dir is {config.run.output_dir!r}, but {error.filename or parent} cannot be written "
            f"({error.strerror or error}); choose a directory that you may write to"
        ) from error
    log_dir = config.tracking.log_dir or str(Path(config.run.output_dir) / "tensorboard")
    return RunDir(path, Path(log_dir).absolute() / config.run.name / path.name, now)


def check_places(config: RunConfig, run_dir: RunDir | None) -> None:
    """Checks that a run can be written where it is to be: a new one, or one that goes on in its directory.

    Raises:
        ServeError: It cannot.
    """
    if run_dir is not None:
        require_writable("the run directory", run_dir.path)
        require_writable("the directory of its event file", run_dir.event_dir)
        return
    require_writable("run.output_dir", Path(config.run.output_dir))
    if config.tracking.log_dir:
        require_writable("tracking.log_dir", Path(config.tracking.log_dir))


@dataclass(frozen=True)
class StoredRun:
    """A run that was started before.

    Attributes:
        run_dir: Its directory.
        working_dir: What relative paths of its configuration are relative to.
        state: How it ended, as far as its ledger knows.
        steps: Training steps done.
    """

    run_dir: RunDir
    working_dir: Path
    state: str
    steps: int


def require_run_dir(path: Path, *files: str) -> None:
    """Checks that a directory holds what that of a run does. Raises `RunError`."""
    for file in files:
        if not (path / file).is_file():
            raise RunError(
                f"{path.absolute()} is no run directory: it has no {file}; give the directory that the run printed as "
                "`run directory`"
            )


def open_run_dir(path: Path) -> StoredRun:
    """Returns the places of a run that was started before.

    Raises:
        RunError: There is none, or another build made it.
    """
    path = path.absolute()
    require_run_dir(path, LEDGER_FILE, CONFIG_FILE)
    try:
        with closing(sqlite3.connect(f"{(path / LEDGER_FILE).as_uri()}?mode=ro", uri=True)) as ledger:
            (found_format,) = ledger.execute("SELECT format_version FROM run").fetchone()
            if found_format != FORMAT_VERSION:
                raise RunError(
                    f"the ledger in {path} has format {found_format}; this build goes on with format {FORMAT_VERSION}: "
                    "resume it with the build that made it"
                )
            created, event_dir, working_dir, state = ledger.execute(
                "SELECT created, event_dir, working_dir, state FROM run"
            ).fetchone()
            steps, _ = count_steps(ledger.execute)
    except sqlite3.Error as error:
        raise RunError(f"the ledger in {path} cannot be read: {error}") from error
    run_dir = RunDir(path, Path(event_dir), datetime.fromisoformat(created))
    return StoredRun(run_dir, Path(working_dir), state, steps)


@contextmanager
def sole_coordinator(run_dir: RunDir) -> Iterator[None]:
    """Holds a run against a second coordinator on this host; the kernel ends that with the process.

    Raises:
        RunError: The run goes on in another process.
    """
    descriptor = os.open(run_dir.path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"the run in {run_dir.path} goes on in another process; stop it with `rollwire stop {run_dir.path}`"
            ) from None
        yield
    finally:
        os.close(descriptor)


def write_config(run_dir: RunDir, config: RunConfig) -> None:
    """Replaces the stored configuration, as a whole. Raises `RunError`."""
    partial = run_dir.config_file.with_suffix(".new")
    try:
        partial.write_text(dump_config(config), encoding="utf-8")
        partial.replace(run_dir.config_file)
    except OSError as error:
        raise RunError(f"{run_dir.config_file} cannot be written: {error.strerror or error}") from error


def _rename_to_free_name(partial: Path, parent: Path, timestamp: str) -> Path:
    """Renames a directory to the timestamp, with a counter when several runs began in the same second."""
    for number in range(1, _MAX_RUNS_PER_SECOND + 1):
        path = parent / (timestamp if number == 1 else f"{timestamp}-{number}")
        try:
            path.mkdir()  # claims the name; renaming onto an empty directory replaces it
        except FileExistsError:
            continue
        partial.replace(path)
        return path
    raise OSError(f"{_MAX_RUNS_PER_SECOND} runs began within one second in {parent}")
