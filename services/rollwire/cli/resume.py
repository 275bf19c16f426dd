"""`--resume`: finds the run that is to go on, and what it goes on with."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollwire.cli.arguments import split_arguments
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.run_dir import CONFIG_FILE, RunDir, open_run_dir
from rollwire.serving.config import ConfigError, RunConfig, load_config
from rollwire.serving.config.resumable import fixed_schedule, resumed_config


@dataclass(frozen=True)
class ResumedRun:
    """A run that is to go on.

    Attributes:
        run_dir: Its directory.
        stored: What it was started or went on with before.
        config: What it goes on with.
        exact: True if what follows can be bit for bit what would have followed.
        steps: Training steps done.
    """

    run_dir: RunDir
    stored: RunConfig
    config: RunConfig
    exact: bool
    steps: int


def find_resumed(path: Path, arguments: Sequence[str] | None) -> ResumedRun:
    """Returns the run in a directory, with overrides; the working directory becomes the one that it was started in.

    Args:
        path: Its directory.
        arguments: Overrides, after a configuration file if it is to be compared with the stored one.

    Raises:
        RunError: There is no run, or nothing of it is left to be done.
        ConfigError: A setting was changed that a run keeps.
    """
    stored = open_run_dir(path)
    file, overrides = split_arguments(arguments)
    before = load_config(stored.run_dir.config_file)
    found = resumed_config(before, load_config(file or stored.run_dir.config_file, overrides))
    if stored.state == "finished" and found.config.run.max_steps == before.run.max_steps:
        made = f"the run in {path} made all of its {before.run.max_steps} steps"
        if (schedule := fixed_schedule(before)) is not None:
            raise RunError(
                f"{made}, for which {schedule} is laid out; start a new run from its export with model.path=…"
            )
        raise RunError(f"{made}; give a larger run.max_steps=… to go on, or start a new run")
    try:
        os.chdir(stored.working_dir)
    except OSError as error:
        raise RunError(
            f"the run was started in {stored.working_dir}, which its relative paths need: {error.strerror}"
        ) from error
    return ResumedRun(stored.run_dir, before, found.config, found.exact, stored.steps)


def how_to_resume(directory: Path, *, launch: bool) -> str:
    """Returns what to type in order to go on with the run in a directory."""
    return f"resume with: rollwire {'launch' if launch else 'train'} --resume {shlex.quote(str(directory))}"


def was_launched(directory: Path) -> bool:
    """Tells whether a run started servers of its own: `launch` leaves no address in the stored configuration."""
    try:
        return not load_config(directory / CONFIG_FILE).services.learner
    except ConfigError:
        return True  # of another build
