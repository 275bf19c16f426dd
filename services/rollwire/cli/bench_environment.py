"""`rollwire bench environment`: turns of FrozenLake per second over gRPC, and what they are compared with.

All servers run in processes of their own, pinned to the same core where there are two or more, and are called from
this process on the others, in alternating windows of one run. Ratios are medians over rounds, the window of one side
against that of the other.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from rollwire.cli.bench_environment_servers import MAX_SESSIONS
from rollwire.cli.bench_environment_sides import (
    HOSTED,
    OPENENV,
    OPENENV_ON_LOOP,
    PLAY,
    PROVIDED,
    PROVIDED_UNARY,
    UNARY,
    Side,
    bench,
    measure,
)
from rollwire.serving.config import ConfigError

PARTS: Final = ("calls", "openenv", "crowd", "import")
_CROWD_WINDOW: Final = 4
"""Windows of the crowd are this many times as long: beginning and ending them takes thousands of calls a while."""

_IMPORTS: Final = 5
_TIMED_IMPORT: Final = "import time; s = time.perf_counter(); import rollwire.client; print(time.perf_counter() - s)"


@dataclass(frozen=True)
class Finding:
    """A figure beside its target.

    Attributes:
        name: What was measured.
        value: The figure.
        target: What it should be; None for a figure that is there to compare with.
        at_most: Whether the target is an upper bound; else it is a lower one.
    """

    name: str
    value: float
    target: float | None = None
    at_most: bool = False

    @property
    def reached(self) -> bool:
        """Whether the target is met, if there is one."""
        if self.target is None:
            return True
        return self.value <= self.target if self.at_most else self.value >= self.target


@dataclass(frozen=True)
class Cores:
    """Where the servers run, and where this process and the provider do; the same core if there is only one."""

    server: Sequence[int]
    client: Sequence[int]


def bench_environment(
    sessions: Annotated[int, typer.Option(min=1, max=1000, help="Sessions that play at once.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Length of one window.")] = 0.5,
    repetitions: Annotated[int, typer.Option(min=1, max=1000, help="Windows of each side.")] = 30,
    crowd: Annotated[int, typer.Option(min=1, max=MAX_SESSIONS, help="Sessions of the server that has many.")] = 4096,
    part: Annotated[list[str] | None, typer.Option(help=f"What to measure: {', '.join(PARTS)}; default: all.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measures turns of FrozenLake per second: unary, Play, providers, OpenEnv; thousands of sessions; import time."""
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ConfigError(f"--json is {json_path}: its directory does not exist")
    parts = _parts(part)
    console = Console()
    cores = _cores()
    load_before = os.getloadavg()[0]
    with console.status("measuring"):
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores.client)
        try:
            sides, findings = asyncio.run(_measure(parts, sessions, crowd, seconds, repetitions, cores))
        finally:
            os.sched_setaffinity(0, before)
        if "import" in parts:
            findings.append(
                Finding("import rollwire.client, s", statistics.median(import_times_s()), 0.3, at_most=True)
            )
    load = (load_before, os.getloadavg()[0])
    if sides:
        console.print(_table(sides, sessions, seconds))
    for line in _lines(findings, repetitions, load, cores):
        console.print(line, highlight=False)
    if json_path is not None:
        json_path.write_text(json.dumps(_as_json(sides, findings, sessions, seconds, load), indent=2) + "\n")


def import_times_s() -> list[float]:
    """Returns how long `import rollwire.client` takes in fresh interpreters, in seconds, files being in memory."""
    times = []
    for _ in range(_IMPORTS + 1):
        run = subprocess.run([sys.executable, "-c", _TIMED_IMPORT], capture_output=True, text=True, check=True)  # noqa: S603
        times.append(float(run.stdout))
    return times[1:]


def _parts(wanted: list[str] | None) -> Sequence[str]:
    for name in wanted or ():
        if name not in PARTS:
            raise ConfigError(f"--part is {name!r}; allowed: {', '.join(PARTS)}")
    missing = [name for name in ("openenv", "uvicorn", "websockets") if importlib.util.find_spec(name) is None]
    if missing and (not wanted or "openenv" in wanted):
        rest = " ".join(f"--part {name}" for name in wanted or PARTS if name != "openenv")
        raise ConfigError(
            f"{', '.join(missing)} is not installed, which `--part openenv` needs: install rollwire[bench], "
            f"or measure the rest with {rest or 'other parts'}"
        )
    return wanted or PARTS


def _cores() -> Cores:
    cores = sorted(os.sched_getaffinity(0))
    return Cores(cores[:1], cores[1:]) if len(cores) > 1 else Cores(cores, cores)


async def _measure(
    parts: Sequence[str],
    sessions: int,
    crowd: int,
    seconds: float,
    repetitions: int,
    cores: Cores,
) -> tuple[list[Side], list[Finding]]:
    sides: list[Side] = []
    findings: list[Finding] = []
    if "calls" in parts or "openenv" in parts:
        async with bench(sessions, cores.server, cores.client) as started:
            sides = [await started.echo()] if "calls" in parts else []
            echoes = sides[:1]
            sides += await started.rollwire()
            if "openenv" in parts:
                sides += await started.openenv()
            await measure(sides, seconds, repetitions)
        findings += _compared({side.name: side for side in sides}, echoes)
    if "crowd" in parts:
        async with bench(sessions, cores.server, cores.client) as started:
            usual, few, everyone = await started.crowd(crowd)
            await measure((usual, few, everyone), _CROWD_WINDOW * seconds, repetitions)
            resident_bytes = everyone.processes[0].resident_bytes()
        findings += [
            Finding(f"memory of the server with {crowd} sessions, GB", resident_bytes / 1e9, 1.0, at_most=True),
            Finding(f"time per step, {few.name} / {usual.name}", _ratio(usual, few), 1.2, at_most=True),
            Finding(f"time per step, {everyone.name} / {usual.name}", _ratio(usual, everyone), 1.2, at_most=True),
        ]
        sides += [usual, few, everyone]
    return sides, findings


def _compared(sides: dict[str, Side], echoes: Sequence[Side]) -> list[Finding]:
    found = [Finding(f"{UNARY} / {echo.name}", _ratio(sides[UNARY], echo), 0.8) for echo in echoes]
    found += [
        Finding(f"{PLAY} / {UNARY}", _ratio(sides[PLAY], sides[UNARY]), 2.5),
        Finding(f"{PROVIDED} / {HOSTED}", _ratio(sides[PROVIDED], sides[HOSTED]), 0.7),
        Finding(f"{PROVIDED} / {PLAY}", _ratio(sides[PROVIDED], sides[PLAY])),
        Finding(f"{PROVIDED_UNARY} / {UNARY}", _ratio(sides[PROVIDED_UNARY], sides[UNARY])),
    ]
    for name in (OPENENV, OPENENV_ON_LOOP):
        if name in sides:
            found += [
                Finding(f"{PLAY} / {name}", _ratio(sides[PLAY], sides[name]), 3.0),
                Finding(f"{UNARY} / {name}", _ratio(sides[UNARY], sides[name])),
            ]
    return found


def _ratio(side: Side, other: Side) -> float:
    pairs = zip(side.windows, other.windows, strict=True)
    return statistics.median(mine.calls_per_s / its.calls_per_s for mine, its in pairs)


def _table(sides: Sequence[Side], sessions: int, seconds: float) -> Table:
    table = Table(
        title=f"{sessions} sessions, windows of {seconds:g} s, median rate, CPU per call", title_justify="left"
    )
    for heading in ("side", "calls/s", "lowest", "highest", "server CPU"):
        table.add_column(heading, justify="left" if heading == "side" else "right", no_wrap=True)
    for side in sides:
        rates = [window.calls_per_s for window in side.windows]
        cpu_us = statistics.median(window.server_cpu_us for window in side.windows)
        table.add_row(
            side.name,
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f}",
            f"{max(rates):,.0f}",
            f"{cpu_us:.0f} µs",
        )
    return table


def _lines(
    findings: Sequence[Finding],
    repetitions: int,
    load: tuple[float, float],
    cores: Cores,
) -> list[str]:
    lines = [
        f"{finding.name}: {finding.value:.2f}" + ("" if finding.target is None else f" ({_verdict(finding)})")
        for finding in findings
    ]
    where = f"servers on core {_names(cores.server)}, client and provider on {_names(cores.client)}"
    return [*lines, f"medians of {repetitions} rounds; {where}; load average {load[0]:.1f} to {load[1]:.1f}"]


def _verdict(finding: Finding) -> str:
    bound = "most" if finding.at_most else "least"
    return f"target: at {bound} {finding.target:g}, {'reached' if finding.reached else 'missed'}"


def _names(cores: Sequence[int]) -> str:
    return ", ".join(map(str, cores))


def _as_json(
    sides: Sequence[Side], findings: Sequence[Finding], sessions: int, seconds: float, load: tuple[float, float]
) -> dict[str, object]:
    return {
        "sessions": sessions,
        "seconds": seconds,
        "load_average": load,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "sides": {side.name: [asdict(window) for window in side.windows] for side in sides},
        "findings": [{**asdict(finding), "reached": finding.reached} for finding in findings],
    }
