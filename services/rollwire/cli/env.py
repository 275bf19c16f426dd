"""`rollwire env`: environments of a configuration or a running server, playing one by hand, writing a new one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import grpc
import typer
import yaml
from rich.console import Console

from rollwire.cli.env_catalogue import catalogue, types
from rollwire.client.environment import EnvironmentClient
from rollwire.rpc.errors import Reason, RollwireError
from rollwire.serving.config import ConfigError, RunConfig, load_config
from rollwire.serving.logs import configure_logging
from rollwire.serving.server import ServeError
from rollwire.v1 import environment_pb2 as pb

app = typer.Typer(
    help="List environments, play one in the terminal, begin one of your own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_PIPED_COLUMNS: Final = 10_000

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Configuration with further environments; default: the built-in ones.")
]
ServerTarget = Annotated[
    str | None, typer.Option("--target", metavar="HOST:PORT", help="Ask a running environment server instead.")
]


@app.command("list")
def list_command(config: ConfigFile = None, target: ServerTarget = None) -> None:
    """List the environments that can be opened, with their options."""
    _check_source(config, target)
    configure_logging("env", level="ERROR")
    if target is not None:
        with _reaching(target):
            listed = asyncio.run(_ask(target))
    else:
        from rollwire.environment.registry import load_registry

        registry = load_registry(load_config(config).environment)
        registry.close()
        listed = pb.ListEnvironmentsResponse(environments=[item.description for item in registry.environments.values()])
    console = Console()
    if not console.is_terminal:  # whoever reads it next wants whole lines
        console.width = _PIPED_COLUMNS
    console.print(catalogue(listed.environments))
    if target is None:
        console.print(types())
    else:
        console.print(f"{target}: {listed.open_sessions} of {listed.session_capacity} sessions open", highlight=False)


@app.command()
def play(
    tag: Annotated[str, typer.Argument(metavar="TAG", help="Environment, such as FrozenLake.", show_default=False)],
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Seed; default: a random one.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="KEY=VALUE", help="Option, such as size=8; repeatable."),
    ] = None,
    config: ConfigFile = None,
    target: ServerTarget = None,
) -> None:
    """Play an episode: with arrow keys where the environment takes moves, else with typed answers."""
    from rollwire.cli.env_failures import StackKeeper
    from rollwire.cli.env_play import EnvironmentFailedError, play_episode

    _check_source(config, target)
    options = parse_options(option or ())
    configure_logging("env", level="ERROR")
    stacks = StackKeeper()
    stacks.install()
    local = load_config(config) if target is None else None
    seed = random.SystemRandom().randrange(10_000) if seed is None else seed
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        client = runner.run(_connect(stack, local, target))
        try:
            with _reaching(client.target):
                play_episode(runner, client, tag, seed, options)
        except EnvironmentFailedError as error:
            raise ServeError(stacks.explain(str(error), remote=target is not None)) from error
        finally:
            runner.run(stack.aclose())


@app.command()
def new(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="New directory; its name names the package.", show_default=False)
    ],
) -> None:
    """Write a project with an environment of your own, a program that serves it, and its tests."""
    from rollwire.cli.env_new import write_project

    tag, written = write_project(directory)
    print(f"{tag} in {directory}:")
    for path in written:
        print(f"  {path}")
    print(f"Next: cd {directory} && pip install -e '.[test]' && pytest")


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Reads `key=value` pairs; values are YAML. Raises `ConfigError`."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--option is {pair!r}; allowed: KEY=VALUE, such as size=8")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"--option {key} is {value!r}, which is no YAML: {' '.join(str(error).split())}"
            ) from error
    return options


def _check_source(config: Path | None, target: str | None) -> None:
    if config is not None and target is not None:
        raise ConfigError("--config and --target exclude each other: a running server has its own configuration")
    if target is not None and (":" not in target or not target.rpartition(":")[2].isdigit()):
        raise ConfigError(f"--target is {target!r}; allowed: HOST:PORT")


@contextmanager
def _reaching(target: str) -> Iterator[None]:
    """Explains a server that cannot be reached."""
    try:
        yield
    except RollwireError as error:
        if error.reason != Reason.TRANSPORT or error.code is not grpc.StatusCode.UNAVAILABLE:
            raise
        raise ServeError(
            f"no environment server answers at {target}; start one with `rollwire serve environment`, or leave out "
            "--target"
        ) from error


async def _ask(target: str) -> pb.ListEnvironmentsResponse:
    async with EnvironmentClient(target) as client:
        return await client.list_environments()


async def _connect(stack: AsyncExitStack, config: RunConfig | None, target: str | None) -> EnvironmentClient:
    """Returns a client of the server at `target`, or of one that is started in this process for `config`."""
    if config is not None:
        from rollwire.environment.service import EnvironmentServer
        from rollwire.serving.server import Binding, serving

        running = await stack.enter_async_context(
            serving(EnvironmentServer(config, show_output=True), Binding(), grace_s=1.0)
        )
        target = running.address
    assert target is not None, "without a target there is a configuration"
    return await stack.enter_async_context(EnvironmentClient(target))
