"""`rollwire bench learner`: the learner's update beside TRL's `GRPOTrainer` and a plain loop, on one model and batch.

Each side updates its own copy of the same model, in a process of its own, by the same batch with the same objective:
tokens, masks, advantages and old log-probabilities are given, nothing is generated. Before anything is measured, the
losses and gradients of all sides are compared: a side that computes something else ends the benchmark. Then they take
turns, so that other load on the machine meets all alike; while one works, the others are idle.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from rich.console import Console
from rich.table import Table

from rollwire.cli.bench_learner_batch import Rollout, draw_batch, drawn_by, read_sizes
from rollwire.cli.bench_learner_service import ServiceRow, measure_service
from rollwire.cli.bench_learner_side import SIDES, Setup, Step, gradient_difference, run_side
from rollwire.cli.bench_process import CommandProcess, command_process
from rollwire.coordinator.launcher import ALLOCATOR_ENVIRONMENT
from rollwire.serving.config import ConfigError
from rollwire.serving.server import ServeError

SERVICE: Final = "service"
_OURS: Final = "rollwire"
_TIMEOUT_S: Final = 3600.0
_BYTES_PER_PARAMETER: Final = 16  # weight, gradient and AdamW's two moments in float32
# Largest differences in loss and gradient that rounding explains.
_TOLERANCES: Final = {"float32": (1e-4, 1e-3), "bfloat16": (0.02, 0.1), "float16": (0.01, 0.05)}
_MIB: Final = 1024 * 1024
_TABLE_WIDTH: Final = 110


@dataclass
class Row:
    """The rounds of one side.

    Attributes:
        steps: Its updates, without gradients; the first one, which makes the moments, is left out.
        loss_difference: From Rollwire's loss, before the first update.
        gradient_difference: From Rollwire's gradient, see `bench_learner_side.gradient_difference`.
    """

    steps: list[Step] = field(default_factory=list)
    loss_difference: float = 0.0
    gradient_difference: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """Most memory in any step."""
        return max(step.peak_bytes for step in self.steps)


@dataclass
class SizeResult:
    """Everything measured with one model.

    Attributes:
        parameters: Number of parameters.
        lengths: Tokens of each sequence of the batch, ascending.
        rows: By side.
        service: The same through the service, where it was asked for.
        load_average: Of one minute, before and after.
    """

    parameters: int
    lengths: list[int]
    rows: dict[str, Row] = field(default_factory=dict)
    service: ServiceRow | None = None
    load_average: list[float] = field(default_factory=list)

    def tokens_per_s(self, side: str) -> list[float]:
        """Returns tokens of the batch, padding not counted, per second of each round."""
        return [sum(self.lengths) / step.seconds for step in self.rows[side].steps]

    def speed_ratio(self, side: str) -> float:
        """Returns how many times as fast as another side Rollwire is: the median over the rounds."""
        pairs = zip(self.rows[side].steps, self.rows[_OURS].steps, strict=True)
        return statistics.median(other.seconds / ours.seconds for other, ours in pairs)

    def memory_ratio(self, side: str) -> float:
        """Returns Rollwire's peak as a share of another side's."""
        return self.rows[_OURS].peak_bytes / self.rows[side].peak_bytes


def bench_learner(
    sizes: Annotated[str, typer.Option(help="Models: 10m, 100m, 500m or HIDDENxLAYERS, with commas.")] = "10m,100m",
    against: Annotated[
        str, typer.Option(help="What Rollwire is compared with: trl, plain, service, with commas.")
    ] = "trl,plain,service",
    sequences: Annotated[int, typer.Option(min=2, max=100_000, help="Sequences of a batch.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Measured updates of each side.")] = 3,
    vocabulary: Annotated[int, typer.Option(min=256, help="Tokens that the models know.")] = 150_000,
    device: Annotated[Literal["cpu", "cuda", "npu"], typer.Option(help="Where all sides compute.")] = "cpu",
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Of forward and backward pass, of all sides.")
    ] = "float32",
    gradient_checkpointing: Annotated[
        bool, typer.Option(help="Compute layers again in the backward pass, on all sides; TRL's default is to do so.")
    ] = False,
    micro_batch_tokens: Annotated[int, typer.Option(min=64, help="Rollwire: most tokens of a pass.")] = 1024,
    trl_sequences: Annotated[int, typer.Option(min=1, help="TRL: sequences of a pass; the default is TRL's own.")] = 8,
    plain_sequences: Annotated[int, typer.Option(min=1, help="Plain loop: sequences of a pass.")] = 2,
    alternate: Annotated[
        bool, typer.Option(help="Take turns; otherwise one side after the other, which takes less memory.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of the batch.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measures tokens per second and peak memory of an update, beside TRL and a plain loop."""
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ConfigError(f"--json is {json_path}: its directory does not exist")
    shapes = read_sizes(sizes)
    others = _read_sides(against)
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)
    results = {}
    for name, shape in shapes.items():
        setup = Setup(
            shape=shape,
            vocabulary=vocabulary,
            device=device,
            precision=precision,
            gradient_checkpointing=gradient_checkpointing,
            micro_batch_tokens=micro_batch_tokens,
            trl_sequences=trl_sequences,
            plain_sequences=plain_sequences,
        )
        batch = draw_batch(sequences, vocabulary, seed)
        with console.status("starting") as status:
            results[name] = measure(setup, batch, others, rounds, alternate=alternate, say=status.update)
        console.print(_table(name, results[name], setup))
    if json_path is not None:
        json_path.write_text(json.dumps({name: _figures(result) for name, result in results.items()}, indent=2) + "\n")


def measure(
    setup: Setup,
    batch: list[Rollout],
    others: Sequence[str],
    rounds: int,
    *,
    alternate: bool,
    say: Callable[[str], object],
) -> SizeResult:
    """Measures one model.

    Args:
        setup: The model and how it is trained.
        batch: Without log-probabilities.
        others: Sides beside Rollwire, and `service`.
        rounds: Updates of each.
        alternate: Take turns.
        say: Told what is being done.

    Raises:
        ServeError: A side does not compute what Rollwire computes, or fails.
    """
    sides = [_OURS, *(name for name in others if name != SERVICE)]
    result = SizeResult(0, sorted(len(item.token_ids) for item in batch), load_average=[os.getloadavg()[0]])
    firsts: dict[str, Step] = {}
    with ExitStack() as stack:
        for group in [sides] if alternate else [[side] for side in sides]:
            with _processes(group, setup) as processes:
                for side, process in processes.items():
                    say(f"{side} starts")
                    result.parameters = process.call("start", timeout_s=_TIMEOUT_S)
                    if side == _OURS:
                        batch = drawn_by(batch, process.call("logprobs", batch, timeout_s=_TIMEOUT_S), seed=0)
                    process.call("prepare", batch, timeout_s=_TIMEOUT_S)
                    firsts[side] = process.call("step", True, timeout_s=_TIMEOUT_S)
                    result.rows[side] = _compared(side, firsts[_OURS], firsts[side], setup.precision)
                for number in range(rounds):
                    for side, process in processes.items():
                        say(f"{side}, round {number + 1} of {rounds}")
                        result.rows[side].steps.append(process.call("step", False, timeout_s=_TIMEOUT_S))
        if SERVICE in others:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollwire-bench-")))
            result.service = asyncio.run(measure_service(directory, setup, batch, rounds, say))
    result.load_average.append(os.getloadavg()[0])
    return result


@contextmanager
def _processes(sides: Sequence[str], setup: Setup) -> Iterator[dict[str, CommandProcess]]:
    # All sides have what Rollwire's servers have, so that no allocator is compared.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **ALLOCATOR_ENVIRONMENT, "HF_HUB_OFFLINE": "1"}
    with ExitStack() as stack:
        yield {
            side: stack.enter_context(command_process(run_side, side, setup, environment=environment)) for side in sides
        }


def _compared(side: str, ours: Step, theirs: Step, precision: str) -> Row:
    assert ours.gradient is not None and theirs.gradient is not None
    row = Row(
        loss_difference=abs(theirs.loss - ours.loss),
        gradient_difference=gradient_difference(theirs.gradient, ours.gradient),
    )
    most_loss, most_gradient = _TOLERANCES[precision]
    if not (row.loss_difference <= most_loss and row.gradient_difference <= most_gradient):
        raise ServeError(
            f"{side} does not compute what {_OURS} computes: losses {theirs.loss:.6g} and {ours.loss:.6g} (allowed "
            f"difference {most_loss:g}), gradients {row.gradient_difference:.2g} apart (allowed {most_gradient:g})"
        )
    return row


def _read_sides(text: str) -> list[str]:
    """Returns the sides of `--against`.

    Raises:
        ConfigError: One of them does not exist, or is not installed.
    """
    known = [*(name for name in SIDES if name != _OURS), SERVICE]
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise ConfigError(f"--against has {name!r}; allowed: {', '.join(known)}")
    if "trl" in names and importlib.util.find_spec("trl") is None:
        raise ConfigError(
            "--against has 'trl', which is not installed; install rollwire with the extra bench, or leave it out: "
            f"--against {','.join(name for name in known if name != 'trl')}"
        )
    return names


def _table(name: str, result: SizeResult, setup: Setup) -> Table:
    lengths = result.lengths
    table = Table(
        title=f"{name}: {result.parameters / 1e6:.1f} M parameters, {len(lengths)} sequences of {lengths[0]} to "
        f"{lengths[-1]} tokens, {sum(lengths)} together; {setup.precision} on {setup.device}, load average "
        f"{result.load_average[0]:.1f} to {result.load_average[1]:.1f}",
        caption=f"weights, gradients and moments alone: {result.parameters * _BYTES_PER_PARAMETER / _MIB:,.0f} MiB",
    )
    for column in ("side", "tokens/s", "Rollwire", "CPU s", "peak MiB", "Rollwire", "Δ loss", "Δ gradient"):
        table.add_column(column, justify="left" if column == "side" else "right", no_wrap=True)
    for side, row in result.rows.items():
        rates = result.tokens_per_s(side)
        table.add_row(
            side,
            f"{statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})",
            f"{result.speed_ratio(side):.2f}x",
            f"{statistics.median(step.cpu_s for step in row.steps):.2f}",
            f"{row.peak_bytes / _MIB:,.0f}",
            f"{result.memory_ratio(side):.2f}x",
            f"{row.loss_difference:.1e}",
            f"{row.gradient_difference:.1e}",
        )
    if result.service is not None:
        rates = [sum(lengths) / seconds for seconds in result.service.seconds]
        publishing = statistics.median(result.service.publishing_s)
        table.add_row(
            SERVICE,
            f"{statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})",
            f"overhead {statistics.median(result.service.overheads):.1%}",
            f"publishing {publishing:.2f} s",
        )
    return table


def _figures(result: SizeResult) -> dict[str, object]:
    others = [side for side in result.rows if side != _OURS]
    figures = asdict(result)
    figures["speed_ratios"] = {side: result.speed_ratio(side) for side in others}
    figures["memory_ratios"] = {side: result.memory_ratio(side) for side in others}
    if result.service is not None:
        figures["service_overheads"] = result.service.overheads
    return figures
