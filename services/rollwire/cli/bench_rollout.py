"""`rollwire bench rollout`: tokens per second of episodes through the servers, beside the bare engine.

The servers are those that `rollwire launch` starts. Their episodes are recorded, and the requests that they made of the
engine are made again of a bare engine in a process of its own: same prompts, seeds, settings and weights, as many
episodes at once, the turns of an episode one after another. Both take turns, so that other load on the machine meets
both alike; while one works, the other is idle. The ratio is the median over the rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from rich.console import Console
from rich.table import Table

from rollwire.cli.arguments import ServeArguments, split_arguments
from rollwire.cli.bench_process import CommandProcess, command_process, tree_cpu_s
from rollwire.cli.bench_rollout_engine import Replay, run_bare_engine
from rollwire.cli.bench_rollout_model import make_model, read_shape
from rollwire.cli.bench_rollout_requests import drawn_tokens, recorded_episode, same_turns
from rollwire.cli.bench_rollout_service import ServiceSide, service_side
from rollwire.coordinator.launcher import child_environment
from rollwire.serving.config import ConfigError, RunConfig, load_config
from rollwire.serving.model_files import model_source

TARGET_RATIO: Final = 0.95
TARGET_ENGINE: Final = "vllm"
TARGET_EPISODES: Final = 64
EPISODES_PER_GROUP: Final = 8
_START_TIMEOUT_S: Final = 300.0
_SERVERS: Final = ("rollout server", "engine", "environment server")
_BARE: Final = ("bare process", "bare engine")


@dataclass(frozen=True)
class Window:
    """One measured round of one side.

    Attributes:
        seconds: Its length.
        tokens: Tokens drawn.
        cpu_s: CPU time by process: `rollout server`, `engine` (processes that the rollout server started),
            `environment server`, `bare process` and `bare engine` likewise. What idles in this round is included.
    """

    seconds: float
    tokens: int
    cpu_s: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        """Tokens drawn per second."""
        return self.tokens / self.seconds


@dataclass
class Row:
    """The rounds with one number of concurrent episodes.

    Attributes:
        concurrent: Episodes at once.
        episodes: Episodes of a round.
        turns: Turns of all rounds.
        service: The servers, round by round.
        bare: The bare engine, round by round.
        same_turns: Share of turns for which both drew the same tokens.
        environment_share: Share of an episode's time that it waited for the environment server.
    """

    concurrent: int
    episodes: int
    turns: int = 0
    service: list[Window] = field(default_factory=list)
    bare: list[Window] = field(default_factory=list)
    same_turns: list[float] = field(default_factory=list)
    environment_share: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Tokens per second of the servers against the bare engine's: the median over the rounds."""
        pairs = zip(self.service, self.bare, strict=True)
        return statistics.median(ours.tokens_per_s / bare.tokens_per_s for ours, bare in pairs)


@dataclass
class RolloutResult:
    """Everything measured.

    Attributes:
        engine: The engine of both sides.
        model: `model.path`, or the shape.
        rows: By number of concurrent episodes.
        load_average: Of one minute, before and after.
    """

    engine: str
    model: str
    rows: list[Row] = field(default_factory=list)
    load_average: list[float] = field(default_factory=list)


def bench_rollout(
    arguments: ServeArguments = None,
    engine: Annotated[Literal["transformers", "vllm"], typer.Option(help="Engine of both sides.")] = "transformers",
    concurrent: Annotated[
        list[int] | None, typer.Option(min=1, max=1024, help="Episodes at once; may be repeated.", show_default="64")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="HIDDENxLAYERS", help="Random weights of this shape instead of model.path.")
    ] = None,
    waves: Annotated[
        int, typer.Option(min=1, max=1000, help="Episodes of a round, as a multiple of those at once.")
    ] = 4,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Rounds of each side.")] = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measures tokens per second of episodes through the servers, beside the bare engine on the same requests."""
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ConfigError(f"--json is {json_path}: its directory does not exist")
    counts = concurrent or [TARGET_EPISODES]
    for count in counts:
        if count > EPISODES_PER_GROUP and count % EPISODES_PER_GROUP:
            raise ConfigError(
                f"--concurrent is {count}; allowed: 1 to {EPISODES_PER_GROUP}, or a multiple of {EPISODES_PER_GROUP}, "
                "because episodes are played in groups of that many"
            )
    sizes = read_shape(shape) if shape is not None else None
    path, overrides = split_arguments(arguments)
    sequences = max(*counts, RunConfig().rollout.max_concurrent_sequences)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="rollwire-bench-") as directory:
        settings = [
            f"rollout.max_concurrent_sequences={sequences}",
            *overrides,
            f"rollout.engine={engine}",
            f"run.output_dir={directory}",
        ]
        with console.status("starting") as status:
            if sizes is not None:
                settings.append(f"model.path={directory}")
                make_model(Path(directory), *sizes)
            config = load_config(path, settings)
            model_source(config.model)
            result = asyncio.run(measure(config, counts, waves, rounds, status.update))
    result.model = shape or result.model
    _print(console, result)
    if json_path is not None:
        figures = asdict(result) | {"ratios": {str(row.concurrent): row.ratio for row in result.rows}}
        json_path.write_text(json.dumps(figures, indent=2) + "\n")


async def measure(
    config: RunConfig, counts: list[int], waves: int, rounds: int, say: Callable[[str], object]
) -> RolloutResult:
    """Starts the processes and measures.

    Args:
        config: The run; `environments[0]` is played.
        counts: Numbers of concurrent episodes.
        waves: Episodes of a round, as a multiple of the concurrent ones.
        rounds: Rounds of each side.
        say: Told what is being done.
    """
    result = RolloutResult(config.rollout.engine, config.model.path, load_average=[os.getloadavg()[0]])
    async with service_side(config) as service:
        with command_process(run_bare_engine, config, environment=child_environment("rollout", config)) as bare:
            await asyncio.to_thread(bare.call, "start", timeout_s=_START_TIMEOUT_S)
            run = _Run(config, service, bare)
            for count in counts:
                say(f"{count} episodes at once: warming up")
                await run.round(Row(count, count))
                row = Row(count, waves * count)
                for number in range(rounds):
                    say(f"{count} episodes at once: round {number + 1} of {rounds}")
                    await run.round(row)
                result.rows.append(row)
    result.load_average.append(os.getloadavg()[0])
    return result


class _Run:
    """Both sides, in turns."""

    def __init__(self, config: RunConfig, service: ServiceSide, bare: CommandProcess) -> None:
        self._config = config
        self._service = service
        self._bare = bare
        self._cpu_s: dict[str, float] = {}

    async def round(self, row: Row) -> None:
        """Plays episodes, makes their requests again of the bare engine, and adds both to the row."""
        size = min(row.concurrent, EPISODES_PER_GROUP)
        at_once = row.concurrent // size
        self._spent_s()
        played = await self._service.play(row.episodes // size, size, at_once)
        spent_s = self._spent_s()
        limit = self._config.rollout.max_episode_tokens
        recorded = [[recorded_episode(trajectory, limit) for trajectory in group] for group in played.groups]
        row.service.append(Window(played.seconds, drawn_tokens(recorded), spent_s))

        self._spent_s()
        replay: Replay = await asyncio.to_thread(
            self._bare.call, "replay", recorded, at_once, timeout_s=self._config.timeouts.group_s
        )
        tokens = sum(len(drawn) for group in replay.drawn for episode in group for drawn in episode)
        row.bare.append(Window(replay.seconds, tokens, self._spent_s()))

        episodes = [trajectory for group in played.groups for trajectory in group]
        waited_s = sum(trajectory.environment_duration.ToNanoseconds() for trajectory in episodes)
        lasted_s = sum(trajectory.duration.ToNanoseconds() for trajectory in episodes)
        row.turns += sum(len(trajectory.turns) for trajectory in episodes)
        row.environment_share.append(waited_s / lasted_s)
        row.same_turns.append(same_turns(recorded, replay.drawn))

    def _spent_s(self) -> dict[str, float]:
        """Returns the CPU time of each process since the last call."""
        ours, bare = tree_cpu_s(self._service.pids["rollout"]), tree_cpu_s(self._bare.pid)
        now = {
            "rollout server": ours[0],
            "engine": ours[1],
            "environment server": sum(tree_cpu_s(self._service.pids["environment"])),
            "bare process": bare[0],
            "bare engine": bare[1],
        }
        spent = {name: seconds - self._cpu_s.get(name, 0.0) for name, seconds in now.items()}
        self._cpu_s = now
        return spent


def _print(console: Console, result: RolloutResult) -> None:
    console.print(_table(result))
    for row in result.rows:
        idle = _share(row.bare, _SERVERS), _share(row.service, _BARE)
        console.print(
            f"{row.concurrent} at once: CPU of the idle side {max(idle):.1%} of a core; turns with the same tokens "
            f"{statistics.mean(row.same_turns):.1%}; waiting for the environment "
            f"{statistics.mean(row.environment_share):.1%} of an episode"
        )
        if result.engine == TARGET_ENGINE and row.concurrent == TARGET_EPISODES:
            verdict = "reached" if row.ratio >= TARGET_RATIO else "missed"
            console.print(f"ratio {row.ratio:.3f}; target {TARGET_RATIO:g}: {verdict}")
    console.print("load average {:.1f} before, {:.1f} after".format(*result.load_average))


def _share(windows: list[Window], processes: Sequence[str]) -> float:
    """Returns the CPU time of processes as a share of one core's time."""
    spent_s = sum(window.cpu_s[process] for window in windows for process in processes)
    return spent_s / sum(window.seconds for window in windows)


def _spent_us(windows: list[Window], processes: Sequence[str]) -> str:
    """Returns the CPU time of each process per token in microseconds, as a sum."""
    tokens = sum(window.tokens for window in windows)
    spent_s = [sum(window.cpu_s[process] for window in windows) for process in processes]
    return " + ".join(f"{seconds / tokens * 1e6:.0f}" for seconds in spent_s)


def _table(result: RolloutResult) -> Table:
    table = Table(title=f"engine {result.engine}, model {result.model}", title_justify="left")
    table.add_column("episodes at once")
    for heading in (
        "tokens/s, servers",
        "bare engine",
        "ratio",
        "tokens per turn",
        "CPU µs per token, servers",
        "bare",
    ):
        table.add_column(heading, justify="right")
    for row in result.rows:
        table.add_row(
            str(row.concurrent),
            _rates(row.service),
            _rates(row.bare),
            f"{row.ratio:.3f}",
            f"{sum(window.tokens for window in row.service) / row.turns:.1f}",
            _spent_us(row.service, _SERVERS),
            _spent_us(row.bare, _BARE),
        )
    return table


def _rates(windows: list[Window]) -> str:
    rates = [window.tokens_per_s for window in windows]
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})"
