"""Training on several ranks gives what training on one gives: real processes over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from .conftest import ROOT, environment

PROGRAM = ROOT / "tests" / "support" / "rank_program.py"
RELATIVE = 1e-6
COMPARED = ("actor/total_loss", "actor_train/grad_norm")


@dataclass(frozen=True)
class Trained:
    """What a scenario ended with."""

    answer: dict[str, Any]
    weights: dict[str, NDArray[np.float32]]

    def metrics(self, name: str) -> NDArray[np.float64]:
        return np.array([step.get(name, np.nan) for step in self.answer["steps"]])


Train = Callable[..., Trained]


def _model(directory: Path, architecture: str) -> Path:
    torch.manual_seed(0)
    changes = {"head_dim": 8} if architecture == "Qwen3" else {}
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=architecture == "Qwen2",
        bos_token_id=None,
        eos_token_id=1,
        **changes,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # biases begin at zero, where a relative difference means little
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model with tied embeddings and biases, one with norms between its split layers, one that cannot be split."""
    made = {name: _model(tmp_path_factory.mktemp(name), name) for name in ("Qwen2", "Qwen3")}
    made["GPT2"] = tmp_path_factory.mktemp("GPT2")
    config = transformers.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    transformers.GPT2LMHeadModel(config).save_pretrained(made["GPT2"])
    return made


@pytest.fixture(scope="module")
def run(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str | Trained]]:
    """Returns what runs a scenario; equal ones run once. The result is what was trained, or an error."""
    answers = tmp_path_factory.mktemp("answers")
    known: dict[str, str | Trained] = {}
    with subprocess.Popen(
        [sys.executable, PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as program:
        assert program.stdin is not None and program.stdout is not None
        tell, hear = program.stdin, program.stdout

        def once(model: str = "Qwen2", *, scenario: dict[str, Any] | None = None, **learner: Any) -> str | Trained:
            # Of Adam's step only the sign is left where gradients vanish, as those of key biases do by nature: a larger
            # epsilon keeps rounding from becoming the step.
            optimizer = {"learning_rate": 1e-3, "weight_decay": 0.1, "epsilon": 1e-3}
            settings = {"optimizer": optimizer, "micro_batch_tokens": 64, **learner}
            config = {"model": {"path": str(models[model])}, "learner": settings, "device": "cpu"}
            if scenario and scenario.get("every_term"):
                config["algorithm"] = {"advantage": "gae", "kl": {"coefficient": 0.1}}
                config["learner"] = {**settings, "critic": {"optimizer": optimizer}}
            key = json.dumps([config, scenario])
            if key not in known:
                answer = answers / f"answer-{len(known)}"
                tell.write(json.dumps({"config": config, "answer": str(answer), **(scenario or {})}) + "\n")
                tell.flush()
                error = json.loads(hear.readline())
                if not error:
                    found = dict(np.load(answer.with_suffix(".npz")))
                    known[key] = Trained(json.loads(answer.with_suffix(".json").read_text()), found)
                else:
                    known[key] = error
            return known[key]

        yield once
        tell.close()


@pytest.fixture
def train(run: Callable[..., str | Trained]) -> Train:
    """Returns what runs a scenario that must succeed."""

    def succeed(*arguments: Any, **named: Any) -> Trained:
        result = run(*arguments, **named)
        assert isinstance(result, Trained), result
        return result

    return succeed


def assert_same(one: Trained, many: Trained, relative: float = RELATIVE) -> None:
    for name in COMPARED:
        np.testing.assert_allclose(many.metrics(name), one.metrics(name), rtol=relative)
    assert one.weights.keys() == many.weights.keys()
    for name, weight in one.weights.items():
        difference = np.abs(many.weights[name] - weight).max()
        close = difference <= relative * np.abs(weight).max()
        assert close, f"{name} differs by {difference}"
    for left, right in zip(one.answer["logprobs"], many.answer["logprobs"], strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


@pytest.mark.parametrize(
    "ranks",
    [
        {"world_size": 2},
        {"world_size": 2, "sharding": "zero3"},
        {"world_size": 4, "sharding": "zero3", "fsdp_size": 2},
        {"world_size": 2, "cpu_offload": True},
        {"world_size": 2, "sharding": "zero3", "gradient_checkpointing": True},
    ],
    ids=["zero2", "zero3", "hybrid", "offload", "checkpointing"],
)
def test_several_ranks_train_as_one_does(train: Train, ranks: dict[str, Any]) -> None:
    """Loss, gradient norm and weights after three steps of two optimizer steps each."""
    one, many = train(), train(**ranks)
    assert_same(one, many)
    shards = ranks.get("fsdp_size", ranks["world_size"])
    assert many.answer["local_elements"] < one.answer["parameters"] / shards * 1.05
    assert many.answer["parameters"] == one.answer["parameters"]


@pytest.mark.parametrize("model", ["Qwen2", "Qwen3"])
@pytest.mark.parametrize(
    "ranks", [{"world_size": 2}, {"world_size": 4, "sharding": "zero3"}], ids=["split", "split and sharded"]
)
def test_split_layers_train_as_whole_ones_do(train: Train, model: str, ranks: dict[str, Any]) -> None:
    """Sums within a matrix product are in another order, so that a little more rounding is expected."""
    assert_same(train(model), train(model, tensor_parallel_size=2, **ranks), relative=5e-6)


@pytest.mark.parametrize(
    "ranks",
    [{"world_size": 2}, {"world_size": 2, "sharding": "zero3"}, {"world_size": 2, "tensor_parallel_size": 2}],
    ids=["zero2", "zero3", "split"],
)
def test_critic_reference_and_every_term_of_the_loss_on_several_ranks(train: Train, ranks: dict[str, Any]) -> None:
    """Ratios over samples and segments, importance correction and value clip see whole samples everywhere."""
    scenario = {"every_term": True}
    one, many = train(scenario=scenario), train(scenario=scenario, **ranks)
    assert_same(one, many, relative=5e-6)
    for left, right in zip(one.answer["values"], many.answer["values"], strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)
    names = set(one.answer["steps"][-1])
    assert {"actor/kl_loss", "actor/is_weight_ess", "critic/loss", "critic/clipfrac"} <= names
    for name in sorted(name for name in names if name.startswith(("actor/", "critic/")) and "_ratio" not in name):
        np.testing.assert_allclose(many.metrics(name), one.metrics(name), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {"cpu_offload": True}])
def test_checkpointing_and_offloading_change_nothing_on_one_rank(train: Train, settings: dict[str, Any]) -> None:
    assert_same(train(), train(**settings))


@pytest.mark.parametrize("ranks", [{}, {"world_size": 2}, {"world_size": 2, "sharding": "zero3"}])
def test_accumulating_is_one_large_batch(train: Train, ranks: dict[str, Any]) -> None:
    assert_same(train(micro_batch_tokens=4096), train(**ranks))


def test_more_ranks_than_samples(train: Train) -> None:
    few = {"samples": 3, "optimizer_steps": 1}
    assert_same(train(scenario=few), train(scenario=few, world_size=4))


@pytest.mark.parametrize("ranks", [{}, {"world_size": 2}, {"world_size": 2, "tensor_parallel_size": 2}])
def test_a_gradient_that_is_not_finite_vetoes_the_step_on_all_ranks(train: Train, ranks: dict[str, Any]) -> None:
    poisoned = train(scenario={"samples": 6, "optimizer_steps": 1, "poisoned_step": 1}, **ranks)
    assert poisoned.metrics("actor/skipped_steps").tolist() == [0, 1, 0]
    assert all(np.isfinite(weight).all() for weight in poisoned.weights.values())
    assert_same(train(scenario={"samples": 6, "optimizer_steps": 1, "poisoned_step": 1}), poisoned, relative=5e-6)


@pytest.mark.parametrize(("precision", "relative"), [("bfloat16", 0.1), ("float16", 0.02)])
def test_half_precision_computes_nearly_the_same_on_any_number_of_ranks(
    train: Train, precision: str, relative: float
) -> None:
    exact, one = train(), train(precision=precision)
    many = train(precision=precision, world_size=2, sharding="zero3")
    steps = one.metrics("actor/skipped_steps") == 0
    assert steps[1:].all()  # the first loss scale of float16 may be too large
    for trained in (one, many):
        for name in COMPARED:
            np.testing.assert_allclose(
                trained.metrics(name)[steps], exact.metrics(name)[steps], rtol=relative, atol=0.02
            )
    np.testing.assert_array_equal(one.metrics("actor/skipped_steps"), many.metrics("actor/skipped_steps"))


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [("GPT2", 2, "transformers has no plan for GPT2LMHeadModel"), ("Qwen2", 4, "num_key_value_heads=2")],
)
def test_models_that_cannot_be_split_are_refused(
    run: Callable[..., str | Trained], model: str, size: int, message: str
) -> None:
    error = run(model, world_size=size, tensor_parallel_size=size)
    assert isinstance(error, str) and message in error and "ServeError" in error


@pytest.mark.parametrize(
    "ranks",
    [{"world_size": 2}, {"world_size": 2, "sharding": "zero3", "gradient_checkpointing": True}],
    ids=["zero2", "zero3"],
)
def test_adapters_on_several_ranks_train_as_on_one(train: Train, ranks: dict[str, Any]) -> None:
    """The frozen base is sharded too, and merged weights are compared."""
    lora = {"lora": {"rank": 4, "alpha": 8}}
    one, many = train(**lora), train(**lora, **ranks)
    assert_same(one, many, relative=5e-6)
    earlier = train(**lora, scenario={"steps": 1})
    assert any(np.abs(many.weights[name] - weight).max() > 1e-4 for name, weight in earlier.weights.items())
