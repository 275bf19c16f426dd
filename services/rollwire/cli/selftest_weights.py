"""`rollwire selftest weights`: does the engine get exactly the learner's weights, and compute the same with them?"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from datetime import datetime
from typing import Any, Final, TypeVar

from rich.console import Console
from rich.table import Table

from rollwire.cli.arguments import split_run_arguments
from rollwire.cli.errors import FAILED
from rollwire.cli.selftest_report import Report, Stage, diagnose
from rollwire.cli.selftest_steps import DEFAULTS, SETTINGS, WeightSelftest
from rollwire.client.learner import LearnerClient
from rollwire.client.rollout import RolloutClient
from rollwire.coordinator.assemble import gap_bound
from rollwire.coordinator.errors import RunError
from rollwire.coordinator.launcher import LocalLauncher
from rollwire.coordinator.logprob_gap import PREFIX
from rollwire.coordinator.peers import READY_POLL_S
from rollwire.coordinator.run_dir import create_run_dir
from rollwire.serving.config import RunConfig, load_config

PROMPTS: Final = 32
MAX_TOKENS: Final = 32
_LONGEST_PROMPT: Final = 150
_TEXT: Final = """A policy is asked the same question twice, once by the engine that plays and once by the learner that
trains it. If both hold the same weights, both must give every word the same probability, whatever the prompt: short or
long, at the beginning of a block of keys and values or in the middle of one. Rows of a frozen lake, for instance: S F F
F / F H F H / F F F H / H F F G. Which way, up, down, left or right? Or 17 * 3 = 51, and def f(x): return x + 1."""
_Result = TypeVar("_Result")


def selftest_weights_command(arguments: Sequence[str] | None) -> None:
    """Starts a learner and a rollout server, runs the test and prints what it found; exit status 1 if it failed.

    Raises:
        ConfigError: The configuration cannot be used.
        ServeError: A server cannot be used.
        RunError: A server does not start, or ends.
    """
    path, overrides = split_run_arguments(arguments)
    settings = [*DEFAULTS, *overrides, *SETTINGS]
    config = load_config(path, settings)
    if config.algorithm.max_logprob_gap == 0:  # off for runs; a test needs a bound
        config = load_config(path, [*settings, "algorithm.max_logprob_gap=auto"])
    prompts = make_prompts(config)
    console = Console()
    with console.status("starting learner and rollout server", spinner="dots") as status:
        report = asyncio.run(_run(config, prompts, status.update))
    print_report(console, config, report)
    if diagnose(report):
        raise SystemExit(FAILED)


def make_prompts(config: RunConfig) -> list[list[int]]:
    """Returns prompts of many lengths, as token ids of the configured model."""
    from rollwire.serving.model_files import load_tokenizer

    token_ids = load_tokenizer(config.model)(_TEXT, add_special_tokens=False)["input_ids"]
    longest = min(_LONGEST_PROMPT, config.rollout.max_episode_tokens - MAX_TOKENS - 1)
    repeated = token_ids * math.ceil((longest + PROMPTS) / len(token_ids))
    lengths = [1 + round((longest - 1) * number / (PROMPTS - 1)) for number in range(PROMPTS)]
    return [repeated[number : number + length] for number, length in enumerate(lengths)]


def print_report(console: Console, config: RunConfig, report: Report) -> None:
    """Prints a table and one line that says whether all is well."""
    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(("weights", "fetched", "read back", "T", "mean gap", "largest", "KL")):
        table.add_column(head, justify="left" if number in (0, 2) else "right", no_wrap=True)
    for stage in report.stages:
        for row in _rows(stage):
            table.add_row(*row)
    console.print(f"engine {config.rollout.engine}, model {config.model.path} in {config.model.dtype}", highlight=False)
    console.print(table, highlight=False)
    tokens = sum(int(gap.get(f"{PREFIX}tokens", 0)) for stage in report.stages for gap in stage.gaps.values())
    console.print(
        f"T is the temperature; gaps in nats, over {tokens:,} tokens; the mean may be {report.bound.nats:g} "
        f"({report.bound.origin})",
        highlight=False,
        soft_wrap=True,
    )
    if math.isfinite(report.moved):
        console.print(f"the step moved the learner's log-probabilities by {report.moved:.2g} nats", highlight=False)
    problem = diagnose(report)
    verdict = f"FAILED  {problem}" if problem else "OK  the engine holds the learner's weights and computes the same"
    console.print(verdict, markup=False, highlight=False, soft_wrap=True)


def _rows(stage: Stage) -> list[list[str]]:
    """Returns one row for each temperature; what holds for all of them stands in the first."""
    held = "differs" if stage.fault else f"= {stage.digest.hex()[:8]}"
    head = [stage.name, f"{stage.received_bytes / 1e6:.1f} MB", held]
    if not stage.gaps:
        return [[*head, "", "", "", ""]]
    rows = []
    for temperature, gap in stage.gaps.items():
        values = [gap.get(f"{PREFIX}{name}", math.nan) for name in ("mean", "max", "k3")]
        rows.append([*head, f"{temperature:g}", *(f"{value:.1e}" for value in values)])
        head = ["", "", ""]
    return rows


async def _run(config: RunConfig, prompts: Sequence[Sequence[int]], show: Any) -> Report:
    launcher = LocalLauncher(config, create_run_dir(config, datetime.now().astimezone()), kinds=("learner", "rollout"))
    try:
        services = await launcher.start()
        async with LearnerClient(services.learner[0]) as learner, RolloutClient(services.rollout[0]) as rollout:
            return await _beside(launcher, _test(config, learner, rollout, prompts, show))
    finally:
        await launcher.stop()


async def _test(
    config: RunConfig, learner: LearnerClient, rollout: RolloutClient, prompts: Sequence[Sequence[int]], show: Any
) -> Report:
    for client in (learner, rollout):
        if not await client.wait_ready(config.timeouts.ready_s, READY_POLL_S):
            limit = f"timeouts.ready_s={config.timeouts.ready_s:g} s"
            raise RunError(f"the server at {client.target} was not ready after {limit}; raise it")
    bound = gap_bound(config, await learner.get_info(), [await rollout.get_info()])
    show("comparing engine and learner")
    return await WeightSelftest(config, learner, rollout, prompts, MAX_TOKENS, bound).run()


async def _beside(launcher: LocalLauncher, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Works while both servers live; one that ends is reported with its own last words."""
    working, watching = asyncio.create_task(work), asyncio.create_task(launcher.watch())
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait([working, watching])
