"""The directory of one run: `<output_dir>/runs/<name>/<timestamp>`, and where its event file goes."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from rollwire.coordinator.errors import RunError
from rollwire.serving.config import RunConfig
from rollwire.serving.config.loader import dump_config

CONFIG_FILE: Final = "config.yaml"
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
