"""`rollwire bench weights` on a small model: every figure is measured, and what does not depend on speed is right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from rollwire.cli.bench_weights import READERS, SHARES, bench_weights
from rollwire.cli.bench_weights_model import ModelShape, change, make_parameters
from rollwire.serving.server import ServeError

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "vocab_size": 4096,
    "num_attention_heads": 4,
}


def test_a_run_measures_everything(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    app = typer.Typer()
    app.command()(bench_weights)
    arguments = ["--config", str(tmp_path / "config.json"), "--rounds", "2", "--json", str(tmp_path / "result.json")]
    shown = CliRunner().invoke(app, [*arguments, "--engine", "transformers"], catch_exceptions=False)
    assert shown.exit_code == 0
    result = json.loads((tmp_path / "result.json").read_text())
    layouts = ModelShape(**SMALL, num_key_value_heads=4).layouts()
    assert result["model_bytes"] == sum(layout.byte_size for layout in layouts.values())
    assert all(
        len(result[name]) == 2 and min(result[name]) > 0 for name in ("raw", "raw_verified", "full", "link_delta")
    )
    moved = [np.median(result["delta_bytes"][str(share)]) for share in SHARES]
    assert moved == sorted(moved)
    assert list(result["readers"]) == [str(count) for count in READERS]
    assert result["link_full"][0] > result["model_bytes"] / 125e6 * 0.5
    assert result["targets"]["1 % changed, bytes against full"]["met"]
    assert len(result["targets"]) == 7
    assert len(result["same_host"]) == 2 and min(result["same_host"]) > 0
    assert len(result["pauses"]) == 3
    for times in result["pauses"].values():
        assert len(times["fetch"]) == len(times["pause"]) == 2 and min(times["fetch"] + times["pause"]) > 0
    assert "1 Gbit/s" in shown.output


def test_an_engine_that_there_is_not_is_one_line() -> None:
    app = typer.Typer()
    app.command()(bench_weights)
    with pytest.raises(ServeError, match="--engine is 'vlm'; allowed: transformers, vllm or none"):
        CliRunner().invoke(app, ["--engine", "vlm"], catch_exceptions=False)


def test_the_default_model_has_half_a_gigabyte() -> None:
    size_bytes = sum(layout.byte_size for layout in ModelShape().layouts().values())
    assert 0.5e9 <= size_bytes < 0.51e9


def test_changes_have_the_share_asked_for() -> None:
    layouts = ModelShape(**SMALL, num_key_value_heads=2, tie_word_embeddings=False).layouts()
    generator = np.random.default_rng(0)
    before = make_parameters(layouts, generator)
    assert {name: len(words) for name, words in before.items()} == {
        name: layout.elements for name, layout in layouts.items()
    }
    after = {name: words.copy() for name, words in before.items()}
    change(after, 0.01, generator)
    changed = sum(np.count_nonzero(before[name] != after[name]) for name in layouts)
    assert 0.009 < changed / sum(map(len, before.values())) <= 0.01


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no json", "cannot be read"),
        ("[1, 2]", "cannot be read"),
        ("{}", "hidden_size is None"),
        (json.dumps(SMALL | {"vocab_size": "many"}), "vocab_size is 'many'"),
        (json.dumps(SMALL | {"num_hidden_layers": 0}), "num_hidden_layers is 0"),
    ],
)
def test_a_config_that_is_none_is_one_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ServeError, match=problem):
        ModelShape.read(path)
