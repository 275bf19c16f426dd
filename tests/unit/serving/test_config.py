"""The configuration: strict, with errors that name the key, the value and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollwire.serving.config.loader import ConfigError, dump_config, load_config


def _error(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value)


def test_defaults_are_complete_and_survive_a_round_trip(tmp_path: Path) -> None:
    config = load_config(None, ["run.name=abc", "learner.optimizer.learning_rate=3e-4"])
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_overrides_win_over_the_file_and_interpolate(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("run: {name: a, max_steps: 5}\ntracking: {log_dir: 'logs/${run.name}'}\n")
    config = load_config(path, ["run.name=b"])
    assert (config.run.name, config.run.max_steps, config.tracking.log_dir) == ("b", 5, "logs/b")


def test_an_override_changes_one_entry_of_a_list_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("environments: [{tag: A, weight: 2}, {tag: B}]\n")
    config = load_config(path, ["environments.1.tag=C", "environments.0.options.size=5"])
    assert [(entry.tag, entry.weight, entry.options) for entry in config.environments] == [
        ("A", 2, {"size": 5}),
        ("C", 1, {}),
    ]


@pytest.mark.parametrize("override", ["environments.5.tag=A", "environments.x.tag=A", "environments={tag: A}"])
def test_an_override_that_does_not_fit_a_list_is_one_line(tmp_path: Path, override: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("environments: [{tag: A}, {tag: B}]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert str(caught.value).startswith(f"override {override!r} cannot be applied: ")
    assert "such as environments.0.weight=2, or the whole list" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["run", "=5", "run..max_steps=5", ".run=5", "run.=5", "--run.max_steps=5"])
def test_an_override_of_another_form_is_named(override: str) -> None:
    assert _error(override) == (f"override {override!r} is not of the form key.path=value, such as run.max_steps=10")


@pytest.mark.parametrize(
    "key",
    [
        "learner.optimizer.learning_rate",
        "learner.optimizer.weight_decay",
        "learner.optimizer.max_grad_norm",
        "learner.optimizer.epsilon",
    ],
)
@pytest.mark.parametrize("value", [".inf", ".nan"])
def test_numbers_are_finite(key: str, value: str) -> None:
    assert _error(f"{key}={value}") == f"{key} is {value[1:]}: input should be a finite number"


@pytest.mark.parametrize(
    "key",
    [
        "run.max_steps",
        "run.keep_checkpoints",
        "sampling.top_k",
        "batch.groups_per_step",
        "rollout.max_new_tokens_per_turn",
        "rollout.max_episode_tokens",
    ],
)
def test_counts_fit_into_the_messages_of_the_contract(key: str) -> None:
    assert f"{key} is 4294967296: input should be less than or equal to 2147483647" in _error(f"{key}=4294967296")


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("run.max_stps=3", "run.max_steps"),
        ("max_steps=3", "run.max_steps"),
        ("learning_rate=1", "learner.optimizer.learning_rate"),
        ("environments=[{tag: A, wieght: 1}]", "environments.0.weight"),
        ("environment.definitions.Foo={type: FrozenLake, option: {}}", "environment.definitions.Foo.options"),
    ],
)
def test_an_unknown_key_names_the_nearest(override: str, near: str) -> None:
    text = _error(override)
    assert f"did you mean {near}?" in text
    assert text.count("\n") == 0


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["batch.episodes_per_group=1"], ["batch.episodes_per_group is 1", "at least 2", "reinforce"]),
        (["batch.groups_per_step=0"], ["batch.groups_per_step is 0", "greater than or equal to 1"]),
        (["learner.optimizer_steps_per_batch=1000"], ["1000", "128 episodes", "lower it"]),
        (["batch.episodes_per_group=64", "rollout.max_episodes=32"], ["64", "rollout.max_episodes=32"]),
        (["rollout.max_episode_tokens=128"], ["max_new_tokens_per_turn is 128", "raise the latter"]),
        (["run.deterministic=true", "max_staleness=1"], ["max_staleness is 1", "set max_staleness=0"]),
        (["sampling.temperature=0"], ["explores"]),
        (["sampling.top_k=50"], ["top_k is 50", "validation.sampling"]),
        (["environments=[]"], ["at least one entry"]),
        (["environments=[{tag: A},{tag: A}]"], ["twice"]),
        (["services.rollout=[localhost]"], ["'localhost'", "host:port"]),
        (["run.name=../x"], ["run.name is '../x'", "lower-case letters, digits"]),
        (["nonsense"], ["key.path=value"]),
        (["run.name=${foo}"], ["interpolation", "foo"]),
        (["device=tpu"], ["device is 'tpu'", "'cpu', 'cuda' or 'npu'"]),
    ],
)
def test_impossible_values_say_what_is_allowed(overrides: list[str], parts: list[str]) -> None:
    text = _error(*overrides)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("run: [", "cannot be read as YAML"),
        ("- a\n", "no mapping"),
        ("just text", "no mapping"),
        (None, "does not exist"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, content: str | None, part: str) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=part) as caught:
        load_config(path)
    assert "config.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_key_has_a_docstring() -> None:
    from rollwire.serving.config.models import RunConfig

    schema = RunConfig.model_json_schema()
    for name, definition in {"RunConfig": schema, **schema["$defs"]}.items():
        for key, field in definition["properties"].items():
            described = field.get("description") or RunConfig.model_fields[key].description
            assert described, f"{name}.{key} has no docstring"
