"""One run from its directory to its summary: connects the servers, drives the loop, exports, ends cleanly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from rollwire.coordinator.assemble import build_parts
from rollwire.coordinator.budgets import Budgets
from rollwire.coordinator.checkpoint_loading import CheckpointLoader
from rollwire.coordinator.edge_check import check_edges
from rollwire.coordinator.errors import ResumeError, RunError
from rollwire.coordinator.journal import Journal
from rollwire.coordinator.journaled import Position, Totals
from rollwire.coordinator.ledger import Ledger
from rollwire.coordinator.ledger_schema import RunRecord
from rollwire.coordinator.logged import read_logged
from rollwire.coordinator.loop import StepLoop
from rollwire.coordinator.option_check import check_options
from rollwire.coordinator.own_port import port_error
from rollwire.coordinator.peers import Descriptions, Peers
from rollwire.coordinator.preflight import check_fit
from rollwire.coordinator.provider_wait import wait_for_tags
from rollwire.coordinator.resume import Resumption
from rollwire.coordinator.run_dir import RunDir
from rollwire.coordinator.service import CoordinatorServer
from rollwire.coordinator.status import RunStatus
from rollwire.coordinator.tracking import METRICS_FILE
from rollwire.coordinator.wording import counted
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.rpc.ids import new_id
from rollwire.rpc.versions import version_text
from rollwire.serving.config import RunConfig
from rollwire.serving.config.loader import dump_config
from rollwire.serving.logs import get_logger
from rollwire.serving.server import Binding, ServeError, serving
from rollwire.v1 import coordinator_pb2, learner_pb2, trajectory_pb2

EXPORT_NAME: Final = "final"
STATUS_GRACE_S: Final = 1.0
END_NOTICE_S: Final = 2.0
"""After its last step a run answers for so long at least: agents and pushers that ask again learn that it has ended."""

# So that the names of checkpoints, which begin with the id, stay names.
_RUN_ID_CHARS: Final = 30
_log = get_logger(__name__)


@dataclass(frozen=True)
class RunSummary:
    """What a run that ended well has to show.

    Attributes:
        totals: Samples, tokens and validations.
        steps: Training steps made.
        elapsed_s: Wall time from the start to the export.
        export_path: Hugging Face directory on the learner's host.
        stop_cause: Why it ended early; None when it made all steps.
        unsaved: Why there is no checkpoint of its end; None when there is one.
    """

    totals: Totals
    steps: int
    elapsed_s: float
    export_path: str
    stop_cause: str | None
    unsaved: str | None = None


@dataclass(frozen=True)
class ResumeOrder:
    """A run is to go on that was started before.

    Attributes:
        exact: False if its configuration was changed such that results differ by rounding.
    """

    exact: bool = True


async def run_training(
    config: RunConfig,
    run_dir: RunDir,
    status: RunStatus,
    *,
    resume: ResumeOrder | None = None,
    budgets: Budgets | None = None,
    children: Callable[[], Mapping[str, int]] = dict,
) -> RunSummary:
    """Drives a run against running servers.

    Args:
        config: The run, with the addresses of its servers.
        run_dir: Its directory.
        status: Is kept up to date; its observer is told what happens.
        resume: How to go on with the run that is in the directory; None for a new one.
        budgets: Bounds of retries; None for the defaults.
        children: Process ids of servers on this host by kind, for memory metrics.

    Raises:
        ConfigError: An address of a server is missing.
        RunError: The run cannot go on; the text is for the user.
    """
    async with AsyncExitStack() as stack:
        ledger, journal = await stack.enter_async_context(_ledger(config, run_dir, status, resume))
        if journal is not None:
            _check_length(config, journal)
        peers = await stack.enter_async_context(Peers(config))
        service = CoordinatorServer(status, peers)
        await _serve(config, run_dir, status, service, stack)
        fence = trajectory_pb2.Fence(run_id=status.run_id, epoch=status.epoch)
        found = await _servers(config, peers, status, fence)
        if found.learner.version.step and journal is None:
            status.notice(f"the learner is at {version_text(found.learner.version)}; the run goes on from there")
        budgets = budgets or Budgets()
        parts = build_parts(config, run_dir, status, ledger, peers, found, budgets, children, stack)
        service.external = parts.external
        status.began = True
        if status.stop_cause is None:
            status.state = coordinator_pb2.RUN_STATE_RUNNING
        position = Position(0, found.learner.version, found.learner.digest)
        await parts.placement.learner()
        if resume is not None and journal is not None:
            loader = CheckpointLoader(peers.learner, fence, config.timeouts.train_s, budgets, status.notice)
            logged = await asyncio.to_thread(read_logged, run_dir.path / METRICS_FILE)
            resumption = Resumption(parts, journal, logged, loader, exact=resume.exact)
            position = await resumption.run(found.learner)
        loop = StepLoop(parts, position)
        await loop.run()
        ended_s = time.monotonic()
        status.begin_phase("exporting")
        path = await _export(peers, fence)
        if parts.external.sources:
            await asyncio.sleep(max(0.0, ended_s + END_NOTICE_S - time.monotonic()))
        return RunSummary(
            loop.totals, status.step, status.elapsed_s, path, status.stop_cause, parts.checkpoints.problem
        )


async def _servers(config: RunConfig, peers: Peers, status: RunStatus, fence: trajectory_pb2.Fence) -> Descriptions:
    """Waits until all servers are there and finds out whether they fit the run; raises `RunError`."""
    status.begin_phase("waiting for the servers")
    await peers.wait_ready(config.timeouts.ready_s, status.notice)
    await wait_for_tags(config, peers, status)
    found = await peers.describe()
    check_fit(config, found)
    await check_options(config, peers.environments)
    await check_edges(config, peers.rollouts, fence)
    return found


@asynccontextmanager
async def _ledger(
    config: RunConfig, run_dir: RunDir, status: RunStatus, resume: ResumeOrder | None
) -> AsyncIterator[tuple[Ledger, Journal | None]]:
    """Opens the ledger and records how the run ends; yields what an earlier incarnation left as well."""
    journal: Journal | None = None
    if resume is None:
        status.run_id = new_id(config.run.name[:_RUN_ID_CHARS])
        run = RunRecord(
            run_id=status.run_id,
            name=config.run.name,
            config=dump_config(config),
            created=run_dir.created.isoformat(timespec="seconds"),
            event_dir=str(run_dir.event_dir),
            working_dir=str(Path.cwd()),
        )
        ledger = await Ledger.create(run_dir.path, run)
    else:
        ledger, journal = await Ledger.resume(run_dir.path, dump_config(config))
        status.run_id = journal.run_id
    structlog.contextvars.bind_contextvars(run=status.run_id)
    status.epoch = ledger.epoch
    end = "failed"
    try:
        await ledger.set_state("running")
        yield ledger, journal
        end = "finished" if status.stop_cause is None else "stopped"
        status.state = coordinator_pb2.RUN_STATE_FINISHED
    except asyncio.CancelledError:
        end = "cancelled" if not status.ended else "failed"
        raise
    finally:
        if end in ("failed", "cancelled"):
            status.state = coordinator_pb2.RUN_STATE_FAILED
        with suppress(RunError):  # what ended the run says more than that the ledger cannot be written
            await ledger.set_state(end)
        await ledger.close()


async def _serve(
    config: RunConfig, run_dir: RunDir, status: RunStatus, service: CoordinatorServer, stack: AsyncExitStack
) -> None:
    """Serves the coordinator's own service until the stack is closed. Raises `RunError`."""
    place = config.coordinator
    binding = Binding(place.host, place.port, place.insecure, ready_file=run_dir.address_file)
    try:
        running = await stack.enter_async_context(serving(service, binding, grace_s=STATUS_GRACE_S))
    except ServeError as error:
        if isinstance(error.__cause__, OSError):  # of the address file
            raise RunError(str(error)) from error
        raise port_error(config) from error
    status.address = running.address
    stack.callback(run_dir.address_file.unlink, missing_ok=True)
    outside = sorted({entry.source for entry in config.environments} - {"environment"})
    if outside:
        status.notice(f"the coordinator listens on {running.address} (for entries with source {' and '.join(outside)})")


def _check_length(config: RunConfig, journal: Journal) -> None:
    if config.run.max_steps < len(journal.steps):
        raise ResumeError(
            f"run.max_steps is {config.run.max_steps}, but the run has begun {counted(len(journal.steps), 'step')}; "
            "allowed: at least so many"
        )


async def _export(peers: Peers, fence: trajectory_pb2.Fence) -> str:
    """Makes the learner write its weights as a Hugging Face directory and returns the path on its host."""
    try:
        response = await _export_as(peers, fence, EXPORT_NAME)
    except RollwireError as error:
        raise RunError(
            f"training is done, but the learner at {peers.learner.target} cannot export its weights: {error}"
        ) from error
    _log.info("exported", path=response.path, version=version_text(response.version), size_bytes=response.bytes)
    return response.path


async def _export_as(peers: Peers, fence: trajectory_pb2.Fence, name: str) -> learner_pb2.ExportResponse:
    """Exports under a name, or under one of this incarnation's own if another one, or another run, took it."""
    try:
        return await peers.learner.export(learner_pb2.ExportRequest(fence=fence, name=name))
    except RollwireError as error:
        if error.reason != Reason.ALREADY_EXISTS:
            raise
        own = f"{name}-{fence.run_id}" + (f"-e{fence.epoch}" if fence.epoch > 1 else "")
        return await peers.learner.export(learner_pb2.ExportRequest(fence=fence, name=own))
