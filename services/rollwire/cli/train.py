"""`rollwire launch` and `rollwire train`: the coordinator in this process, with or without servers of its own."""

from __future__ import annotations

import asyncio
import io
import signal
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TextIO

from rich.console import Console

from rollwire.cli.arguments import split_run_arguments
from rollwire.cli.dry_run import print_dry_run, processes
from rollwire.cli.interrupts import EXIT_STATUS, Interrupts
from rollwire.cli.progress import Progress
from rollwire.cli.resume import ResumedRun, find_resumed, how_to_resume
from rollwire.cli.summary import print_summary
from rollwire.coordinator.errors import ResumeError, RunError
from rollwire.coordinator.launcher import LocalLauncher, open_log
from rollwire.coordinator.own_port import check_port
from rollwire.coordinator.peers import check_addresses
from rollwire.coordinator.preflight import check_launch
from rollwire.coordinator.run import ResumeOrder, RunSummary, run_training
from rollwire.coordinator.run_dir import RunDir, check_places, create_run_dir, sole_coordinator, write_config
from rollwire.coordinator.status import RunStatus
from rollwire.coordinator.wording import counted
from rollwire.serving.config import RunConfig, load_config
from rollwire.serving.logs import configure_logging
from rollwire.serving.model_files import model_source
from rollwire.serving.server import ServeError
from rollwire.v1 import coordinator_pb2

DEATH_DELAY_S: Final = 0.5
_AT_ONCE: Final = {
    signal.SIGINT: "press Ctrl-C again to end it at once",
    signal.SIGTERM: "a second SIGTERM ends it at once",
}


def launch_command(arguments: Sequence[str] | None, *, dry_run: bool, resume: Path | None = None) -> None:
    """Starts all servers on this host and trains. Raises `ConfigError`, `ServeError` or `RunError`."""
    _command(arguments, dry_run=dry_run, launch=True, resume=resume)


def train_command(arguments: Sequence[str] | None, *, dry_run: bool, resume: Path | None = None) -> None:
    """Trains against the servers under `services`. Raises `ConfigError` or `RunError`."""
    _command(arguments, dry_run=dry_run, launch=False, resume=resume)


def _command(arguments: Sequence[str] | None, *, dry_run: bool, launch: bool, resume: Path | None) -> None:
    if resume is not None:
        resumed = find_resumed(resume, arguments)
        config = resumed.config
    else:
        resumed = None
        config = load_config(*split_run_arguments(arguments))
    console = Console()
    # Found here, such mistakes cost no start of four processes and leave no run directory.
    if launch:
        check_launch(config)
        model_source(config.model)
    check_places(config, resumed.run_dir if resumed is not None else None)
    if dry_run:
        print_dry_run(console, config, launch=launch, resumed=resumed)
        return
    if not launch:
        check_addresses(config)
    check_port(config)
    run_dir = resumed.run_dir if resumed is not None else create_run_dir(config, datetime.now().astimezone())
    console.print(f"run directory  {run_dir.path}", markup=False, highlight=False, soft_wrap=True)
    with sole_coordinator(run_dir):
        if resumed is not None:
            write_config(run_dir, config)
        _run(console, config, run_dir, launch=launch, resumed=resumed)


def _run(console: Console, config: RunConfig, run_dir: RunDir, *, launch: bool, resumed: ResumedRun | None) -> None:
    """Runs to the end and prints the summary."""
    launcher = LocalLauncher(config, run_dir) if launch else None
    progress = Progress(console, config.run.name, config.run.max_steps)
    if launcher is not None:
        console.print(f"starting       {processes(config)}, logs in {run_dir.log_dir.name}/")
    interrupts = Interrupts(
        on_first=lambda number: progress.on_notice(f"ending the run; {_AT_ONCE[number]}"),
        on_second=lambda: _give_up(console, launcher),
    )
    order = ResumeOrder(resumed.exact) if resumed is not None else None
    with _coordinator_log(run_dir) as log, progress:
        configure_logging("coordinator", stream=log)
        try:
            summary = asyncio.run(_supervised(config, run_dir, progress.status, launcher, interrupts, order))
        except asyncio.CancelledError:
            if interrupts.received is None:
                raise
            summary = None
        except (RunError, ServeError) as error:
            if progress.status.began and not isinstance(error, ResumeError):
                raise RunError(f"{error}\n  {how_to_resume(run_dir.path, launch=launch)}") from error
            # Where the message names a log file, a person will want to read it.
            if resumed is None and str(run_dir.path) not in str(error):
                _remove(console, run_dir)
            raise
        finally:
            if resumed is not None and not progress.status.began:
                write_config(run_dir, resumed.stored)  # what kept the run from going on is not asked for again
    if summary is None:
        assert interrupts.received is not None
        console.print(f"ended by {interrupts.received.name} after {counted(progress.status.step, 'step')}")
        if progress.status.began:
            console.print(how_to_resume(run_dir.path, launch=launch), markup=False, highlight=False, soft_wrap=True)
        elif resumed is None:
            _remove(console, run_dir)
        raise SystemExit(EXIT_STATUS[interrupts.received])
    print_summary(console, summary, run_dir)
    if summary.stop_cause is not None:
        console.print(how_to_resume(run_dir.path, launch=launch), markup=False, highlight=False, soft_wrap=True)


async def _supervised(
    config: RunConfig,
    run_dir: RunDir,
    status: RunStatus,
    launcher: LocalLauncher | None,
    interrupts: Interrupts,
    resume: ResumeOrder | None,
) -> RunSummary:
    """Runs, with servers of its own when there is a launcher; afterwards those are gone."""
    task = asyncio.current_task()
    assert task is not None
    interrupts.install(task)
    if launcher is None:
        return await run_training(config, run_dir, status, resume=resume)
    try:
        status.begin_phase("starting the servers")
        services = await launcher.start()
        config = config.model_copy(update={"services": services})
        run = run_training(config, run_dir, status, resume=resume, children=lambda: launcher.pids)
        return await _beside(launcher, status, run)
    finally:
        status.begin_phase("stopping the servers")
        await launcher.stop()


async def _beside(launcher: LocalLauncher, status: RunStatus, run: Coroutine[Any, Any, RunSummary]) -> RunSummary:
    """Runs while all servers live. The first one that ends, ends the run, and its own last words are the reason."""
    running, watching = asyncio.create_task(run), asyncio.create_task(launcher.watch())
    try:
        await asyncio.wait([running, watching], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            status.state = coordinator_pb2.RUN_STATE_FAILED  # so that the ledger does not call it cancelled
            watching.result()
        try:
            return running.result()
        except RunError as error:
            # A server that has just died breaks calls before the kernel reports its end.
            await asyncio.wait([watching], timeout=DEATH_DELAY_S)
            raise launcher.death() or error from None
    finally:
        for task in (running, watching):
            task.cancel()
        await asyncio.wait([running, watching])


@contextmanager
def _coordinator_log(run_dir: RunDir) -> Iterator[TextIO]:
    """Opens the log of this process. Raises `RunError`."""
    log = io.TextIOWrapper(open_log(run_dir.log_dir / "coordinator.log"), encoding="utf-8")
    try:
        yield log
    finally:
        with suppress(OSError):  # a full disk costs the last lines and nothing else
            log.close()


def _remove(console: Console, run_dir: RunDir) -> None:
    """Removes the directory that was printed, and says so."""
    run_dir.remove()
    console.print("the run directory was removed: the run ended before it recorded anything")


def _give_up(console: Console, launcher: LocalLauncher | None) -> None:
    """Leaves nothing behind but what is on disk."""
    if launcher is not None:
        launcher.kill()
    console.show_cursor()
