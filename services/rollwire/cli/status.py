"""`rollwire status` and `rollwire stop`: talk to the coordinator of a run."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
from google.protobuf import json_format
from rich.console import Console
from rich.table import Table

from rollwire.cli.resume import how_to_resume, was_launched
from rollwire.client.coordinator import CoordinatorClient
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.journal import count_steps
from rollwire.coordinator.ledger import FILE_NAME
from rollwire.coordinator.peers import kind_name
from rollwire.coordinator.run_dir import ADDRESS_FILE, CONFIG_FILE, require_run_dir
from rollwire.coordinator.wording import counted
from rollwire.rpc.errors import RollwireError
from rollwire.rpc.limits import MIB
from rollwire.rpc.versions import version_text
from rollwire.v1 import coordinator_pb2

SHOWN_METRICS = ("critic/score/mean", "val/score/mean", "system/samples", "system/tps", "time/step_total")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that a run can go on from."""

    name: str
    steps: int
    path: str
    bytes: int


@dataclass(frozen=True)
class EndedRun:
    """What the ledger says about a run whose coordinator is gone.

    Attributes:
        run_id: Its identifier.
        state: How it ended.
        steps: Steps that are done, each counted once however many lineages of weights it was trained in.
        planned: Steps after those whose batch is fixed: they had begun, or are to be trained again in a new lineage.
        checkpoints: What it can go on from.
    """

    run_id: str
    state: str
    steps: int
    planned: int
    checkpoints: list[SavedCheckpoint]


def status_command(target: str, *, as_json: bool) -> None:
    """Prints the status of a run, from its coordinator or, once that is gone, from its ledger. Raises `RunError`."""
    try:
        status = asyncio.run(_get_status(target))
    except RunError:
        ended = read_ended_run(Path(target))
        if ended is None:
            raise
        if as_json:
            print(json.dumps(asdict(ended)))
        else:
            _print_ended(ended, Path(target).absolute())
        return
    if as_json:
        print(json_format.MessageToJson(status, preserving_proto_field_name=True))
    else:
        _print(status)


def stop_command(target: str, cause: str) -> None:
    """Asks a run to end after the step in progress. Raises `RunError`."""
    by_directory = Path(target).is_dir()

    async def ask() -> coordinator_pb2.StopResponse:
        address = _address(target)
        if by_directory:
            await _get_status(target)  # whether it is this run that answers
        async with CoordinatorClient(address) as client:
            try:
                return await client.stop(cause)
            except RollwireError as error:
                raise _unreachable(address, error) from error

    print(_state_text(asyncio.run(ask()).state))


def read_ended_run(directory: Path) -> EndedRun | None:
    """Returns what the ledger in a run directory says; None if there is none that can be read."""
    path = directory / FILE_NAME
    if not path.is_file():
        return None
    try:
        connection = sqlite3.connect(path)
        try:
            run_id, state = connection.execute("SELECT run_id, state FROM run").fetchone()
            steps, planned = count_steps(connection.execute)
            saved = connection.execute("SELECT name, step, path, bytes FROM checkpoints ORDER BY step").fetchall()
        finally:
            connection.close()
    except sqlite3.Error:
        return None
    state = "interrupted" if state in ("starting", "running") else state
    return EndedRun(run_id, state, steps, planned, [SavedCheckpoint(*row) for row in saved])


async def _get_status(target: str) -> coordinator_pb2.GetStatusResponse:
    address = _address(target)
    async with CoordinatorClient(address) as client:
        try:
            status = await client.get_status()
        except RollwireError as error:
            raise _unreachable(address, error) from error
    known = read_ended_run(Path(target))
    if known is not None and known.run_id != status.run_id:
        # A coordinator that was killed leaves its address behind, and its port to others.
        raise RunError(f"no run is going on in {target}: at its last address {address} answers {status.run_id} by now")
    return status


def _address(target: str) -> str:
    """Returns the coordinator's address, which a run directory holds while the run goes on."""
    directory = Path(target)
    if not directory.is_dir():
        host, _, port = target.rpartition(":")
        if not host or not port.isdigit():
            raise RunError(f"TARGET is {target!r}; allowed: a run directory, or HOST:PORT of a coordinator")
        return target
    require_run_dir(directory, CONFIG_FILE)
    try:
        address: str = json.loads((directory / ADDRESS_FILE).read_text())["address"]
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"no run is going on in {directory}: it holds no {ADDRESS_FILE}") from error
    return address


def _unreachable(address: str, error: RollwireError) -> RunError:
    if error.code is grpc.StatusCode.UNAVAILABLE:
        return RunError(f"no coordinator answers at {address}; has its run ended?")
    return RunError(f"the coordinator at {address} answers {error}")


def _state_text(state: coordinator_pb2.RunState.ValueType) -> str:
    return coordinator_pb2.RunState.Name(state).removeprefix("RUN_STATE_").lower()


def _print_ended(run: EndedRun, directory: Path) -> None:
    """Prints how a run ended, the checkpoints that its ledger knows, and how to go on with it. Lines are never cut."""
    begun = f", {counted(run.planned, 'more step')} begun" if run.planned else ""
    print(f"{run.run_id}: {run.state}, {counted(run.steps, 'step')} committed{begun}")
    sizes = [f"{checkpoint.bytes / MIB:,.1f} MiB" for checkpoint in run.checkpoints]
    after = [counted(checkpoint.steps, "step") for checkpoint in run.checkpoints]
    for steps, size, checkpoint in zip(after, sizes, run.checkpoints, strict=True):
        widths = max(map(len, after)), max(map(len, sizes))
        print(f"checkpoint after {steps:<{widths[0]}}  {size:>{widths[1]}}  {checkpoint.path}")
    if run.state != "finished":
        print(how_to_resume(directory, launch=was_launched(directory)))


def _print(status: coordinator_pb2.GetStatusResponse) -> None:
    console = Console()
    console.print(
        f"{status.run_name} ({status.run_id}, epoch {status.epoch}): {_state_text(status.state)}, "
        f"step {status.step} of {status.max_steps}, {status.elapsed.seconds} s, {version_text(status.version)}",
        soft_wrap=True,
    )
    table = Table("server", "address", "ready", "version")
    for service in status.services:
        ready = "yes" if service.ready else "no"
        version = version_text(service.version) if service.HasField("version") else ""
        table.add_row(kind_name(service.kind), service.target, ready, version)
    console.print(table)
    for name in SHOWN_METRICS:
        if name in status.latest_metrics:
            console.print(f"{name}: {status.latest_metrics[name]:g}")
