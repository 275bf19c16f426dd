"""`rollwire bench learner` on a tiny model: what is counted is right, and sides that compute something else are found.

TRL's side is exercised only where TRL is installed; the environment that runs all tests does not have it.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from rollwire.cli.bench_learner import Row, SizeResult, _compared, bench_learner
from rollwire.cli.bench_learner_batch import SIZES, draw_batch, drawn_by, make_model, read_sizes
from rollwire.cli.bench_learner_service import ServiceRow
from rollwire.cli.bench_learner_side import Step, gradient_difference
from rollwire.serving.config import ConfigError
from rollwire.serving.server import ServeError

TRL_IS_HERE = importlib.util.find_spec("trl") is not None
OTHERS = ["plain", "trl"] if TRL_IS_HERE else ["plain"]
TINY = ["--sizes", "64x2", "--vocabulary", "500", "--sequences", "4", "--rounds", "2", "--trl-sequences", "2"]


def invoke(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(bench_learner)
    shown = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert shown.exit_code == 0
    return shown.output


def test_all_sides_compute_the_same_update_and_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "result.json"

    output = invoke(*TINY, "--against", ",".join([*OTHERS, "service"]), "--json", str(path))

    (result,) = json.loads(path.read_text()).values()
    assert result["parameters"] == sum(parameter.numel() for parameter in make_model(*tiny()).parameters())
    assert result["lengths"] == sorted(len(item.token_ids) for item in draw_batch(4, 500, 0))
    assert list(result["rows"]) == ["rollwire", *OTHERS]
    for row in result["rows"].values():
        assert row["loss_difference"] < 1e-5
        assert row["gradient_difference"] < 1e-4
        assert [step["gradient"] for step in row["steps"]] == [None, None]
        assert all(step["seconds"] > 0 and step["cpu_s"] > 0 for step in row["steps"])
        assert min(step["peak_bytes"] for step in row["steps"]) >= result["parameters"] * 16
    assert result["speed_ratios"].keys() == result["memory_ratios"].keys() == set(OTHERS)
    assert len(result["service"]["seconds"]) == len(result["service_overheads"]) == 2
    assert all(0 < overhead < 1 for overhead in result["service_overheads"])
    assert "64x2: 0.1 M parameters, 4 sequences" in output


def tiny() -> tuple[Any, int]:
    return read_sizes("64x2")["64x2"], 500


@pytest.mark.parametrize(
    "options",
    [["--precision", "bfloat16", "--no-alternate"], ["--gradient-checkpointing", "--micro-batch-tokens", "4096"]],
    ids=lambda options: options[0],
)
def test_other_settings_change_all_sides_alike(options: list[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"

    invoke(*TINY, "--rounds", "1", "--against", ",".join(OTHERS), "--json", str(path), *options)

    (result,) = json.loads(path.read_text()).values()
    limit = 0.05 if "bfloat16" in options else 1e-4
    assert all(row["gradient_difference"] < limit for row in result["rows"].values())


def test_ratios_are_medians_over_rounds_that_were_next_to_each_other() -> None:
    def row(seconds: list[float], peaks: list[int]) -> Row:
        return Row([Step(each, each, 0.0, peak, None) for each, peak in zip(seconds, peaks, strict=True)])

    result = SizeResult(1, [10, 30], {"rollwire": row([1, 2, 4], [5, 6, 5]), "trl": row([3, 4, 16], [9, 12, 12])})

    assert result.speed_ratio("trl") == 3.0
    assert result.memory_ratio("trl") == 0.5
    assert result.tokens_per_s("rollwire") == [40, 20, 10]


def test_overhead_is_what_is_neither_training_nor_publishing() -> None:
    assert ServiceRow([10.0], [8.0], [1.0]).overheads == pytest.approx([0.1])


def test_a_side_that_computes_something_else_ends_the_benchmark() -> None:
    ours = Step(1, 1, 0.5, 0, {"w": (1.0, np.ones(4, np.float32))})
    assert _compared("trl", ours, replace(ours, loss=0.50001), "float32").loss_difference == pytest.approx(1e-5)

    for theirs in (
        replace(ours, loss=0.6),
        replace(ours, loss=float("nan")),
        replace(ours, gradient={"w": (1.0, np.array([1, 1, 1, 1.01], np.float32))}),
        replace(ours, gradient={}),
    ):
        with pytest.raises(ServeError, match="trl does not compute what rollwire computes"):
            _compared("trl", ours, theirs, "float32")


def test_gradients_that_are_zero_but_for_rounding_are_equal() -> None:
    large, rounding = np.full(4, 10.0, np.float32), np.full(4, 1e-7, np.float32)

    assert gradient_difference({"a": (20, large), "b": (0, rounding)}, {"a": (20, large), "b": (0, -rounding)}) < 1e-4
    assert gradient_difference({"a": (20, large)}, {"a": (20, large * 1.1)}) == pytest.approx(0.1 / 1.1, rel=1e-3)


def test_a_batch_is_skewed_and_the_same_for_the_same_seed() -> None:
    batch = draw_batch(400, 1000, seed=3)

    lengths = np.array([len(item.token_ids) for item in batch])
    assert lengths.min() >= 32 and lengths.max() <= 1024
    assert np.median(lengths) * 1.2 < lengths.mean() < lengths.max() / 3
    assert all(item.prompt_tokens == len(item.token_ids) // 4 for item in batch)
    again = draw_batch(400, 1000, seed=3)
    assert all(np.array_equal(left.token_ids, right.token_ids) for left, right in zip(batch, again, strict=True))
    drawn = drawn_by(batch, [np.full(len(item.token_ids), -6, np.float32) for item in batch], seed=0)
    noise = np.concatenate([item.logprobs + 6 for item in drawn])
    assert noise.std() == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(("name", "millions"), [("10m", 10), ("100m", 100), ("500m", 500)])
def test_named_sizes_are_what_their_names_say(name: str, millions: int) -> None:
    import torch

    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in make_model(SIZES[name], 150_000).parameters())

    assert count / 1e6 == pytest.approx(millions, rel=0.05)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--sizes", "7b"], "--sizes has '7b'"),
        (["--sizes", "100x2"], "--sizes has '100x2'"),
        (["--against", "verl"], "--against has 'verl'"),
        (["--json", "/missing/result.json"], "directory does not exist"),
        *([] if TRL_IS_HERE else [(["--against", "trl"], "extra bench, or leave it out: --against plain,service")]),
    ],
)
def test_a_mistake_is_one_line(options: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        invoke(*options)
