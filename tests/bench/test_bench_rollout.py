"""`rollwire bench rollout` on few episodes: both sides draw, and what is counted and asked is right."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rollwire.cli.bench_process import answer_commands, command_process, tree_cpu_s
from rollwire.cli.bench_rollout import Row, Window, bench_rollout
from rollwire.cli.bench_rollout_engine import replay
from rollwire.cli.bench_rollout_model import make_model, read_shape
from rollwire.cli.bench_rollout_requests import RecordedTurn, drawn_tokens, recorded_episode, same_turns
from rollwire.rollout.engine import GenerationRequest, Sampling
from rollwire.rollout.seeds import derive_seed
from rollwire.serving.config import ConfigError
from rollwire.serving.server import ServeError
from rollwire.v1 import trajectory_pb2

SAMPLING = Sampling(0.5, 1.0, 0, 4, frozenset({9, 7}), trajectory_pb2.LOGPROB_MODE_SAMPLED)


def _invoke(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(bench_rollout)
    shown = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert shown.exit_code == 0
    return shown.output


def test_a_run_counts_tokens_and_replays_the_same_requests(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = ["--concurrent", "2", "--concurrent", "1", "--waves", "2", "--rounds", "2", "--json", str(path)]
    output = _invoke(*options, "rollout.torch_threads=1", "device=cpu")
    result = json.loads(path.read_text())
    assert [row["concurrent"] for row in result["rows"]] == [2, 1]
    for row in result["rows"]:
        assert row["episodes"] == 2 * row["concurrent"]
        assert len(row["service"]) == len(row["bare"]) == 2
        # The same engine, weights and seeds: it may differ only in a last bit that tips a draw.
        assert min(row["same_turns"]) > 0.5
        for ours, bare in zip(row["service"], row["bare"], strict=True):
            assert ours["tokens"] == pytest.approx(bare["tokens"], rel=0.3)
            assert ours["seconds"] > 0
            assert bare["seconds"] > 0
            assert ours["cpu_s"]["rollout server"] > 0
            assert bare["cpu_s"]["bare process"] > 0
        assert row["turns"] >= 2 * row["episodes"]
    assert result["ratios"].keys() == {"2", "1"}
    assert "engine transformers" in output


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--concurrent", "20"], "--concurrent is 20"),
        (["--shape", "100x2"], "--shape is '100x2'"),
        (["--json", "/missing/result.json"], "directory does not exist"),
        (["rollout.engin=x"], "unknown key rollout.engin"),
    ],
)
def test_a_mistake_is_one_line(options: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        _invoke(*options)


def test_requests_are_those_that_the_episode_made() -> None:
    sequences = [
        trajectory_pb2.TokenSequence(token_ids=[1, 2, 3, 9, 4, 5, 6]),
        trajectory_pb2.TokenSequence(token_ids=[8, 7]),
    ]

    def turn(index: int, sequence: int, begin: int, end: int) -> trajectory_pb2.Turn:
        response = trajectory_pb2.TokenRange(begin=begin, end=end)
        return trajectory_pb2.Turn(index=index, sequence=sequence, response=response)

    trajectory = trajectory_pb2.Trajectory(
        trajectory_id="g-e0-a0",
        sampling_seed=5,
        sequences=sequences,
        turns=[turn(0, 0, 2, 4), turn(1, 0, 5, 7), turn(2, 1, 1, 2)],
        sampling=trajectory_pb2.SamplingSettings(
            temperature=0.5,
            top_p=1.0,
            max_tokens=4,
            stop_token_ids=[7, 9],
            logprob_mode=trajectory_pb2.LOGPROB_MODE_SAMPLED,
        ),
    )
    episode = recorded_episode(trajectory, 100)
    assert [(turn.request.token_ids, turn.drawn) for turn in episode] == [
        ([1, 2], [3, 9]),
        ([1, 2, 3, 9, 4], [5, 6]),
        ([8], [7]),
    ]
    assert [turn.request.seed for turn in episode] == [derive_seed(5, index) for index in range(3)]
    assert all(turn.request.sampling == SAMPLING and turn.request.length_limit_tokens == 100 for turn in episode)
    assert drawn_tokens([[episode], [episode]]) == 10


def test_the_share_of_same_turns() -> None:
    turns = [RecordedTurn(_request(0), [1, 2]), RecordedTurn(_request(1), [3])]
    assert same_turns([[turns]], [[[[1, 2], [3]]]]) == 1.0
    assert same_turns([[turns]], [[[[1, 2], [4]]]]) == 0.5


def test_the_ratio_is_the_median_over_rounds() -> None:
    row = Row(8, 8)
    for tokens in (50, 100, 90):
        row.service.append(Window(1.0, tokens, {}))
        row.bare.append(Window(2.0, 200, {}))
    assert row.ratio == pytest.approx(0.9)


async def test_turns_of_an_episode_follow_each_other_and_groups_wait() -> None:
    engine = _Recorder()
    groups = [[[RecordedTurn(_request(10 * group + turn), [0]) for turn in range(3)]] * 2 for group in range(4)]
    result = await replay(engine, groups, groups_at_once=2)
    assert [[len(episode) for episode in group] for group in result.drawn] == [[3, 3]] * 4
    assert engine.most == 4
    assert engine.ended == 8
    for group in range(4):
        order = [seed for seed in engine.order if seed // 10 == group]
        assert order == sorted(order)


def test_a_process_answers_and_its_problems_are_raised() -> None:
    with command_process(_process, 3, environment=dict(os.environ)) as process:
        assert process.call("add", 4, timeout_s=60) == 7
        with pytest.raises(ServeError, match="no model"):
            process.call("fail", timeout_s=60)
        own, _ = tree_cpu_s(process.pid)
        process.call("burn", 0.2, timeout_s=60)
        assert tree_cpu_s(process.pid)[0] - own > 0.1
        assert tree_cpu_s(os.getpid())[1] >= tree_cpu_s(process.pid)[0] - 0.05
        with pytest.raises(ServeError, match="has ended"):
            process.call("leave", timeout_s=60)
    assert not Path(f"/proc/{process.pid}").exists()


def test_a_model_of_a_shape_has_the_policys_tokenizer(tmp_path: Path) -> None:
    make_model(tmp_path, *read_shape("256x2"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]) == (256, 2, 4)
    assert {file.name for file in tmp_path.iterdir()} >= {"model.safetensors", "tokenizer.json"}


def _request(seed: int) -> GenerationRequest:
    return GenerationRequest([1], SAMPLING, seed, 100, cache_key="e")


class _Recorder:
    """An engine that notes what is asked."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.running = self.most = self.ended = 0

    async def draw(self, request: GenerationRequest) -> list[int]:
        self.order.append(request.seed)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        return [0]

    def end(self, cache_key: str) -> None:
        self.ended += 1

    async def close(self) -> None:
        pass


def _process(pipe, start: int) -> None:  # type: ignore[no-untyped-def]
    """A process that knows a few commands."""
    import time

    async def add(number: int) -> int:
        return start + number

    async def fail() -> None:
        raise ServeError("no model")

    async def burn(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    async def leave() -> None:
        os._exit(3)

    asyncio.run(answer_commands(pipe, {"add": add, "fail": fail, "burn": burn, "leave": leave}))
