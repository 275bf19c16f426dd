"""The client of OpenEnv: against a real server of the package, and against one that breaks the protocol."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.server import ServerConnection, serve

from rollwire.environment.adapters.openenv import OpenEnv, OpenEnvError

PROGRAM = Path(__file__).parents[2] / "support" / "openenv_guess.py"
SETTINGS: dict[str, Any] = {
    "max_turns": 30,
    "action_field": "number",
    "action_type": "integer",
    "action_pattern": "<answer>(.*?)</answer>",
    "observation_field": "text",
    "format_penalty": -0.1,
    "success_reward": 1.0,
    "connect_timeout_s": 60.0,
}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with subprocess.Popen([sys.executable, str(PROGRAM)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", process
        finally:
            process.kill()


@pytest.fixture
def play(server: tuple[str, Any]) -> Iterator[Callable[..., OpenEnv]]:
    made: list[OpenEnv] = []

    def make(**settings: Any) -> OpenEnv:
        made.append(OpenEnv(server[0], **{**SETTINGS, **settings}))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


def answer(number: object) -> str:
    return f"<answer>{number}</answer>"


def found(environment: OpenEnv, seed: int) -> int:
    """Searches the number of a seed by halving."""
    environment.reset(seed)
    least, most = 1, 20
    for turn in range(1, 30):
        guess = (least + most) // 2
        if guess == 13:  # which breaks this server
            guess = 12 if least <= 12 else 14
        text, reward, terminated, truncated, info = environment.step(answer(guess))
        assert not truncated and reward == float(terminated) == info["metrics"]["success"]
        if terminated:
            assert text == "found"
            return turn
        least, most = (guess + 1, most) if text == "higher" else (least, guess - 1)
    raise AssertionError("not found")


def test_an_episode_is_played_on_the_server(play: Callable[..., OpenEnv]) -> None:
    environment = play(instructions="Find it.")
    text, info = environment.reset(3)
    assert (text, info) == ("Guess from 1 to 20.", {"instructions": "Find it."})
    turns = [found(play(), seed) for seed in (3, 4, 3)]
    assert turns[0] == turns[2], "the seed decides the number"


def test_an_answer_that_cannot_be_read_costs_the_penalty_and_the_server_does_not_see_it(
    play: Callable[..., OpenEnv],
) -> None:
    environment = play()
    before, _ = environment.reset(3)
    for response in ("7", answer("seven"), answer("7.5"), answer(""), "<answer>" * 10_000):
        text, reward, terminated, _, info = environment.step(response)
        assert (text, reward, terminated) == (before, -0.1, False)
        assert info["metrics"] == {"action_is_valid": 0.0, "format_penalty": -0.1, "success": 0.0}
    assert environment.step(answer("1"))[0] in ("higher", "found")


def test_words_stand_for_values_and_the_whole_observation_is_json(play: Callable[..., OpenEnv]) -> None:
    environment = play(actions={"One": 1, "Twenty": 20}, observation_field="", action_constants={"note": "hello"})
    assert environment.reset(3)[0].startswith('{"text": "Guess from 1 to 20."')
    assert '"lower"' in environment.step(answer("tWenty"))[0]
    assert environment.step(answer("two"))[4]["metrics"]["action_is_valid"] == 0.0


def test_an_answer_may_be_the_whole_action(play: Callable[..., OpenEnv]) -> None:
    environment = play(action_field="", action_type="json", action_pattern="^(.*)$", reset_options={"highest": 2})
    assert environment.reset(3)[0] == "Guess from 1 to 2."
    assert environment.step('{"number": 0}')[0] == "higher"
    assert environment.step("[1]")[4]["metrics"]["action_is_valid"] == 0.0


def test_an_error_of_the_environment_or_of_the_action_is_a_failure(play: Callable[..., OpenEnv]) -> None:
    environment = play()
    environment.reset(3)
    with pytest.raises(OpenEnvError, match="the server answers step with 'error': EXECUTION_ERROR: 13 is unlucky"):
        environment.step(answer(13))
    wrong = play(action_field="nummer")
    wrong.reset(3)
    with pytest.raises(OpenEnvError, match="VALIDATION_ERROR"):
        wrong.step(answer(1))
    blind = play(observation_field="board")
    with pytest.raises(OpenEnvError, match="the observation has no field 'board'; it has: text"):
        blind.reset(3)


def test_a_server_that_is_killed_is_a_failure() -> None:
    with subprocess.Popen([sys.executable, str(PROGRAM)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        environment = OpenEnv(f"ws://127.0.0.1:{int(process.stdout.readline())}/ws", **SETTINGS)
        try:
            environment.reset(3)
        finally:
            process.kill()
        process.wait()
        with pytest.raises(OpenEnvError, match="the connection broke during step"):
            environment.step(answer(1))
        environment.close()
        with pytest.raises(OpenEnvError, match="no OpenEnv server answers at ws://127"):
            environment.reset(3)


def garbage(reply: str | bytes | None) -> Callable[[ServerConnection], None]:
    def handle(connection: ServerConnection) -> None:
        for _ in connection:
            if reply is not None:
                connection.send(reply)

    return handle


OBSERVATION = '{"type": "observation", "data": {"observation": {"text": "x"}, "reward": REWARD, "done": false}}'


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ("nonsense", "the reply to reset is no JSON"),
        ("[" * 100_000, "the reply to reset is no JSON"),
        ("[]", "the reply to reset is '\\[\\]'; allowed: an object with type and data"),
        ('{"type": "observation", "data": 3}', "allowed: an object with type and data"),
        ('{"type": "state", "data": {}}', "the server answers reset with 'state'"),
        ('{"type": "error", "data": {"code": "CAPACITY_REACHED"}}', "CAPACITY_REACHED: no message"),
        ('{"type": "observation", "data": {}}', "the observation has no field 'text'"),
        ("x" * (5 * 2**20), "the connection broke during reset"),
        (None, r"no reply to reset within 0\.2 s"),
    ],
)
def test_a_server_that_breaks_the_protocol_is_a_failure(reply: str | None, says: str) -> None:
    with serve(garbage(reply), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        timeout_s = 0.2 if reply is None else 60.0
        port = server.socket.getsockname()[1]
        environment = OpenEnv(f"ws://127.0.0.1:{port}", **{**SETTINGS, "reply_timeout_s": timeout_s})
        try:
            with pytest.raises(OpenEnvError, match=says):
                environment.reset(1)
        finally:
            environment.close()
            server.shutdown()
            thread.join(timeout=60)


def test_a_reward_that_is_no_number_is_a_failure() -> None:
    with serve(garbage(OBSERVATION.replace("REWARD", '"high"')), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        environment = OpenEnv(f"ws://127.0.0.1:{server.socket.getsockname()[1]}", **SETTINGS)
        try:
            environment.reset(1)
            with pytest.raises(OpenEnvError, match="the reward is 'high'; allowed: a number"):
                environment.step(answer(1))
        finally:
            environment.close()
            server.shutdown()
            thread.join(timeout=60)


def test_an_address_of_another_kind_is_refused() -> None:
    for url in ("127.0.0.1:80", "file:///etc", "http://"):
        with pytest.raises(ValueError, match="allowed: http, https, ws or wss"):
            OpenEnv(url, max_turns=1)
