"""One episode by hand: arrow keys on a terminal, lines of standard input otherwise."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from rollwire.cli.env_board import board, is_board
from rollwire.client.environment import EnvironmentClient
from rollwire.rpc.errors import invalid_field
from rollwire.rpc.ids import new_id
from rollwire.serving.server import ServeError
from rollwire.v1 import environment_pb2 as pb

_LEASE_S: Final = 3600
_MOVES: Final = ("Left", "Down", "Right", "Up")
_KEYS: Final = {
    **dict(zip((b"\x1b[D", b"\x1b[B", b"\x1b[C", b"\x1b[A"), _MOVES, strict=True)),
    **dict(zip((b"\x1bOD", b"\x1bOB", b"\x1bOC", b"\x1bOA"), _MOVES, strict=True)),
    **dict(zip((b"a", b"s", b"d", b"w"), _MOVES, strict=True)),
}
_QUIT: Final = (b"q", b"\x03", b"\x04", b"")

Answers = Callable[[], str | None]


class EnvironmentFailedError(ServeError):
    """The environment failed; the text is one line."""


@dataclass
class Game:
    """What the screen shows."""

    tag: str
    seed: int
    observation: str
    max_turns: int
    turn: int = 0
    score: float = 0.0
    ended: str = ""

    def view(self, note: Text, *, tiles: bool = True) -> Group:
        """Draws the current state: heading, board, and a note."""
        heading = Text.assemble(
            (f" {self.tag}", "bold"),
            (f"   seed {self.seed}   turn ", "dim"),
            f"{self.turn}/{self.max_turns}",
            ("   score ", "dim"),
            (f"{self.score:g}", "bold green" if self.score > 0 else "bold red" if self.score < 0 else "bold"),
        )
        return Group(Text(), heading, Text(), board(self.observation, tiles=tiles), Text(), Padding(note, (0, 1)))


def play_episode(
    runner: asyncio.Runner, client: EnvironmentClient, tag: str, seed: int, options: Mapping[str, Any]
) -> None:
    """Plays one episode and ends with the score.

    Raises:
        RollwireError: The server refuses.
        EnvironmentFailedError: The environment failed.
    """
    opened = runner.run(client.open_session(_request(tag, seed, options)))
    _raise_failure(tag, opened.failure)
    game = Game(tag, seed, opened.observation, opened.max_turns)
    console = Console()
    if opened.instructions:
        console.print(Text(f"\n{opened.instructions.rstrip()}", style="dim"))
    moves = is_board(opened.observation) and all(move in opened.instructions for move in _MOVES)
    try:
        if sys.stdin.isatty() and console.is_terminal and moves:
            _play_with_keys(runner, client, opened.session_id, game, console)
        else:
            _play_with_lines(runner, client, opened.session_id, game, console, moves=moves)
    finally:
        runner.run(client.close_session(opened.session_id))


def _play_with_keys(
    runner: asyncio.Runner, client: EnvironmentClient, session_id: str, game: Game, console: Console
) -> None:
    help_line = Text("arrow keys or w a s d to move, q to stop", style="dim")
    with _key_reader() as read_key, Live(game.view(help_line), console=console, auto_refresh=False) as live:
        try:
            while not game.ended:
                key = read_key()
                if key in _QUIT:
                    game.ended = "stopped"
                elif key in _KEYS:
                    reply = runner.run(client.step(session_id, game.turn, _answer(_KEYS[key])))
                    note = _take(game, reply)
                    live.update(game.view(note if game.ended else Text.assemble(help_line, "   ", note)), refresh=True)
        except KeyboardInterrupt:
            game.ended = "stopped"
        live.update(game.view(_verdict(game)), refresh=True)


def _play_with_lines(
    runner: asyncio.Runner, client: EnvironmentClient, session_id: str, game: Game, console: Console, *, moves: bool
) -> None:
    """Plays answers from standard input, one a line; a bare move such as `left` is put into the answer's format."""
    interactive = sys.stdin.isatty()
    note = Text("type a move (left, down, right, up), or a whole answer" if moves else "type an answer", style="dim")
    if interactive:
        note.append("; Ctrl-D stops")
    while True:
        console.print(game.view(note, tiles=console.is_terminal))
        if game.ended:
            return
        if interactive:
            console.print("> ", end="")
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            line = ""
        if not line:
            game.ended = "stopped"
            note = _verdict(game)
            continue
        text = line.rstrip("\r\n")
        move = text.strip().capitalize()
        action = _answer(move) if moves and move in _MOVES else text
        note = _take(game, runner.run(client.step(session_id, game.turn, action)))
        if game.ended:
            note = _verdict(game)


def _take(game: Game, reply: pb.StepResponse) -> Text:
    """Brings the game up to date and returns what happened."""
    _raise_failure(game.tag, reply.failure)
    game.observation = reply.observation
    game.turn += 1
    game.score += reply.reward
    if reply.terminated or reply.truncated:
        game.ended = "finished" if reply.terminated else "out of turns"
    happened = Text(f"reward {reply.reward:+g}" if reply.reward else "", style="green" if reply.reward > 0 else "red")
    if reply.metrics.get("action_is_valid") == 0:
        happened.append("  not a valid action", style="red")
    elif reply.metrics.get("action_is_effective") == 0:
        happened.append("  no way there", style="yellow")
    return happened


def _verdict(game: Game) -> Text:
    turns = "1 turn" if game.turn == 1 else f"{game.turn} turns"
    style = "bold green" if game.score > 0 else "bold"
    return Text.assemble((f"{game.ended} after {turns}: score {game.score:g}", style), "\n")


def _request(tag: str, seed: int, options: Mapping[str, Any]) -> pb.OpenSessionRequest:
    request = pb.OpenSessionRequest(request_id=new_id("play"), environment_tag=tag, seed=seed)
    try:
        request.options.update(dict(options))
    except (TypeError, ValueError) as error:
        raise invalid_field("options", dict(options), "values that JSON can hold") from error
    request.lease.FromSeconds(_LEASE_S)
    return request


def _answer(move: str) -> str:
    """Returns a move in a format that both FrozenLake and FrozenLakeThink take."""
    return f"<think>played by hand</think><answer>{move}</answer>"


def _raise_failure(tag: str, failure: pb.EnvironmentFailure) -> None:
    if failure.kind:
        raise EnvironmentFailedError(f"environment {tag} failed: {failure.type}: {failure.message}")


@contextmanager
def _key_reader() -> Iterator[Callable[[], bytes]]:
    """Switches the terminal to single keys; gives a function that waits for one."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    typed = bytearray()  # several keys may come at once

    def read_key() -> bytes:
        if not typed:
            typed.extend(os.read(descriptor, 64))
        length = 3 if bytes(typed[:2]) in (b"\x1b[", b"\x1bO") else 1
        key = bytes(typed[:length])
        del typed[:length]
        return key

    try:
        tty.setcbreak(descriptor)
        yield read_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
