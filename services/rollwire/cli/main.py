"""`rollwire`: the commands and their options. What they do is in the other modules of this package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from rollwire.cli.arguments import DryRun, Resume, RunArguments, ServeArguments, Target
from rollwire.cli.errors import user_errors

# A command whose arguments another command line reads.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    help="Reinforcement learning of language-model agents as four gRPC services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
serve_app = typer.Typer(help="Start one server.", no_args_is_help=True)
config_app = typer.Typer(help="Look at configurations.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure a part of the system.", no_args_is_help=True)
selftest_app = typer.Typer(help="Prove that a part of the system is right on this machine.", no_args_is_help=True)
app.add_typer(serve_app, name="serve")
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")
app.add_typer(selftest_app, name="selftest")

Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65_535, help="TCP port; 0 takes a free one.")]
ReadyFile = Annotated[Path | None, typer.Option(help="Write address and process id here once the port is bound.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow an address that other hosts can reach.")]
DebugServices = Annotated[bool, typer.Option("--debug-services", help="Offer gRPC reflection.")]
LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], typer.Option(help="Least level that is logged.")]
ParentPid = Annotated[int | None, typer.Option(hidden=True)]


@app.command()
def launch(
    arguments: RunArguments = None,
    launcher: Annotated[Literal["local"], typer.Option(help="Where the servers run.")] = "local",
    dry_run: DryRun = False,
    resume: Resume = None,
) -> None:
    """Start all servers on this host and train."""
    with user_errors():
        from rollwire.cli.train import launch_command

        launch_command(arguments, dry_run=dry_run, resume=resume)


@app.command()
def train(arguments: RunArguments = None, dry_run: DryRun = False, resume: Resume = None) -> None:
    """Train with servers that run already, at the addresses under `services`."""
    with user_errors():
        from rollwire.cli.train import train_command

        train_command(arguments, dry_run=dry_run, resume=resume)


@app.command()
def status(target: Target, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show how a run is doing."""
    with user_errors():
        from rollwire.cli.status import status_command

        status_command(target, as_json=as_json)


@app.command()
def stop(
    target: Target, cause: Annotated[str, typer.Option(help="For the log.")] = "asked for on the command line"
) -> None:
    """End a run after the step in progress."""
    with user_errors():
        from rollwire.cli.status import stop_command

        stop_command(target, cause)


@serve_app.command("environment")
def serve_environment(
    arguments: ServeArguments = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    ready_file: ReadyFile = None,
    insecure: Insecure = False,
    debug_services: DebugServices = False,
    log_level: LogLevel = "INFO",
    parent_pid: ParentPid = None,
) -> None:
    """Serve environments."""
    with user_errors():
        from rollwire.cli.serve import ServeOptions, serve

        options = ServeOptions(host, port, ready_file, insecure, debug_services, log_level, parent_pid)
        serve("environment", arguments, options)


@serve_app.command("rollout")
def serve_rollout(
    arguments: ServeArguments = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    ready_file: ReadyFile = None,
    insecure: Insecure = False,
    debug_services: DebugServices = False,
    log_level: LogLevel = "INFO",
    parent_pid: ParentPid = None,
) -> None:
    """Serve the policy: it plays episodes and generates."""
    with user_errors():
        from rollwire.cli.serve import ServeOptions, serve

        options = ServeOptions(host, port, ready_file, insecure, debug_services, log_level, parent_pid)
        serve("rollout", arguments, options)


@serve_app.command("learner")
def serve_learner(
    arguments: ServeArguments = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    ready_file: ReadyFile = None,
    insecure: Insecure = False,
    debug_services: DebugServices = False,
    log_level: LogLevel = "INFO",
    parent_pid: ParentPid = None,
) -> None:
    """Serve the learner."""
    with user_errors():
        from rollwire.cli.serve import ServeOptions, serve

        options = ServeOptions(host, port, ready_file, insecure, debug_services, log_level, parent_pid)
        serve("learner", arguments, options)


@config_app.command("show")
def config_show(arguments: ServeArguments = None) -> None:
    """Print a configuration with all defaults resolved, as YAML."""
    with user_errors():
        from rollwire.cli.config_commands import show

        show(arguments)


@config_app.command("schema")
def config_schema() -> None:
    """Print the schema of configurations, as JSON Schema."""
    with user_errors():
        from rollwire.cli.config_commands import schema

        schema()


@config_app.command("import-roll")
def config_import_roll(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML file of ROLL's agentic pipeline.", show_default=False)
    ],
) -> None:
    """Print a ROLL configuration as one of Rollwire, and on stderr each key that was changed or left out, and why."""
    with user_errors():
        from rollwire.cli.config_commands import import_roll

        import_roll(path)


@app.command("env", add_help_option=False, context_settings=_PASS_ON)
def env(context: typer.Context) -> None:
    """List environments, and play one in the terminal."""
    with user_errors():
        from rollwire.cli import env as commands

        commands.app(args=context.args, prog_name="rollwire env")


@bench_app.command("environment", add_help_option=False, context_settings=_PASS_ON)
def bench_environment(context: typer.Context) -> None:
    """Turns of FrozenLake per second over gRPC, beside a bare unary echo."""
    with user_errors():
        from rollwire.cli.bench_environment import bench_environment as command

        _run_bench(command, "environment", context.args)


@bench_app.command("weights", add_help_option=False, context_settings=_PASS_ON)
def bench_weights(context: typer.Context) -> None:
    """Weight updates from learner to rollout server, full and as a delta."""
    with user_errors():
        from rollwire.cli.bench_weights import bench_weights as command

        _run_bench(command, "weights", context.args)


@bench_app.command("rollout", add_help_option=False, context_settings=_PASS_ON)
def bench_rollout(context: typer.Context) -> None:
    """Tokens per second of episodes through the servers, beside the bare engine."""
    with user_errors():
        from rollwire.cli.bench_rollout import bench_rollout as command

        _run_bench(command, "rollout", context.args)


@bench_app.command("learner", add_help_option=False, context_settings=_PASS_ON)
def bench_learner(context: typer.Context) -> None:
    """Tokens per second and peak memory of an update, beside TRL and a plain loop."""
    with user_errors():
        from rollwire.cli.bench_learner import bench_learner as command

        _run_bench(command, "learner", context.args)


@bench_app.command("ranks", add_help_option=False, context_settings=_PASS_ON)
def bench_ranks(context: typer.Context) -> None:
    """Training steps of a learner of several ranks, beside one of a single rank."""
    with user_errors():
        from rollwire.cli.bench_ranks import bench_ranks as command

        _run_bench(command, "ranks", context.args)


@selftest_app.command("weights")
def selftest_weights(arguments: RunArguments = None) -> None:
    """Compare the weights and log-probabilities of engine and learner, before and after a training step."""
    with user_errors():
        from rollwire.cli.selftest_weights import selftest_weights_command

        selftest_weights_command(arguments)


def _run_bench(command: Callable[..., None], name: str, arguments: list[str]) -> None:
    """Runs a benchmark, whose options are those of its function."""
    bench = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    bench.command()(command)
    bench(args=arguments, prog_name=f"rollwire bench {name}")


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
