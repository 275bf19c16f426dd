"""Files are read as Hydra would compose them, and refused with what to do where that is impossible."""

from __future__ import annotations

from pathlib import Path

import pytest
from roll_files import converted, setting, told

from rollwire.cli.import_roll.convert import convert
from rollwire.serving.config import ConfigError


def test_an_included_file_is_read_where_it_is_and_the_file_itself_wins(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "traj_envs.yaml").write_text(
        "max_tokens_per_step: 17\nmax_actions_per_traj: 6\n"
        "custom_env:\n  FrozenLake:\n    env_type: frozen_lake\n    max_tokens_per_step: ${max_tokens_per_step}\n"
        "    env_config: {max_steps: '${max_actions_per_traj}', is_slippery: true}\n"
    )
    (tmp_path / "example").mkdir()
    result = converted(tmp_path / "example", {"max_tokens_per_step": 40})

    assert setting(result, "rollout.max_new_tokens_per_turn") == 40
    options = setting(result, "environment.definitions.FrozenLake.options")
    assert options["max_steps"] == 6 and options["is_slippery"] is True
    assert options["format_penalty"] == 0.0, "ROLL's constructor gives no penalty unless it is told to"
    assert told(result, "defaults") == ""


def test_what_is_missing_on_disk_but_known_is_told(tmp_path: Path) -> None:
    result = converted(tmp_path, {})
    assert "../config/traj_envs: not there" in told(result, "defaults")
    assert setting(result, "environment.definitions.FrozenLake.options.max_steps") == 10


def test_later_includes_win_and_self_says_where_the_file_stands(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("seed: 1\nexp_name: one\n")
    (tmp_path / "two.yaml").write_text("seed: 2\ndefaults: [one]\n")
    includes = ["../config/traj_envs@_here_", "two@_here_"]
    assert setting(converted(tmp_path, {"defaults": includes}, without=("seed",)), "run.seed") == 2
    assert setting(converted(tmp_path, {"defaults": includes, "seed": 3}), "run.seed") == 3
    assert setting(converted(tmp_path, {"defaults": ["_self_", *includes], "seed": 3}), "run.seed") == 2


def test_an_include_may_have_a_package(tmp_path: Path) -> None:
    (tmp_path / "speed.yaml").write_text("learning_rate: 0.5\n")
    includes = ["../config/traj_envs@_here_", {"optional speed@actor_train.training_args": None}]
    assert setting(converted(tmp_path, {"defaults": includes}), "learner.optimizer.learning_rate") == 1e-6
    includes = ["../config/traj_envs@_here_", "speed@actor_train.training_args"]
    result = converted(tmp_path, {"defaults": includes}, without=("actor_train.training_args.learning_rate",))
    assert setting(result, "learner.optimizer.learning_rate") == 0.5


def test_environment_variables_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLICY", "/models/mine")
    assert setting(converted(tmp_path, {"pretrain": "${oc.env:POLICY}"}), "model.path") == "/models/mine"
    assert setting(converted(tmp_path, {"pretrain": "${oc.env:NO_SUCH,small}"}), "model.path") == "small"


def test_an_interpolation_without_a_value_fails_only_where_the_value_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"variant.yaml: pretrain has no value: .*NO_SUCH_VARIABLE"):
        converted(tmp_path, {"pretrain": "${oc.env:NO_SUCH_VARIABLE}"})
    result = converted(tmp_path, {"track_with": "wandb", "tracker_kwargs": {"api_key": "${oc.env:NO_SUCH_VARIABLE}"}})
    assert told(result, "tracker_kwargs.api_key").startswith("Unsupported")
    result = converted(tmp_path, {"custom_envs.Other": {"env_type": "frozen_lake", "agent_template": "${nowhere}"}})
    assert "no group plays" in told(result, "custom_envs.Other.agent_template")


def test_values_that_may_be_secret_are_not_printed(tmp_path: Path) -> None:
    changes = {"track_with": "wandb", "tracker_kwargs": {"api_key": "s3cret"}, "system_envs": {"TOKEN": "s3cret"}}
    result = converted(tmp_path, changes)
    assert "s3cret" not in result.report + result.yaml
    assert "export it" in told(result, "system_envs.TOKEN")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "cannot be read as YAML"),
        ("- a\n- b\n", "holds no mapping"),
        ("pretrain: x\nrewards: {math: {}}\nactor_train: {}\n", "it looks like one of the rlvr pipeline"),
        ("run: {seed: 1}\n", "no configuration of ROLL's agentic pipeline"),
        ("defaults: [../config/other@_here_]\n", "include '../config/other', but .*known without a file: traj_envs"),
        ("defaults: [[1]]\n", "`defaults` hold"),
        ("defaults: [roll]\n", "does a file include itself"),
        ("a: 1\na: 2\n", "cannot be read as YAML.*duplicate"),
    ],
)
def test_what_cannot_be_converted_says_why(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "roll.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        convert(path)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        convert(tmp_path / "roll.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_batch_size": 7}, "rollout_batch_size is 7; allowed: a multiple of train_env_manager.group_size"),
        ({"rollout_batch_size": -1}, "rollout_batch_size is -1"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"seed": "x"}, "seed is 'x'; allowed: an integer"),
        ({"adv_estimator": "magic"}, "adv_estimator is 'magic'; allowed: gae, reinforce"),
        ({"loss_agg_mode": "sum"}, "loss_agg_mode is 'sum'"),
        ({"whiten_advantages": 3}, "allowed: true or false"),
        ({"actor_train.device_mapping": "os.fork()"}, "actor_train.device_mapping is 'os.fork\\(\\)'; allowed: a list"),
        ({"train_env_manager.tags": ["Nowhere"]}, "'Nowhere' is played, but custom_envs does not define it"),
        ({"train_env_manager.tags": []}, "allowed: a list of tags"),
        (
            {"custom_envs.FrozenLake": "${custom_env.WebShopEnv}"},
            "none of the tags .*FrozenLake \\(env_type webshop",
        ),
        ({"sequence_length": None}, "sets neither sequence_length nor response_length"),
        ({"pretrain": None}, "names no model; set pretrain"),
        ({"use_opd": True}, "no on-policy distillation"),
        ({"async_generation_ratio": 100}, "max_staleness"),
        ({"exp_name": "..."}, "exp_name is '...'"),
    ],
)
def test_values_that_roll_would_not_take_either_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        converted(tmp_path, changes)


def test_older_files_that_include_deepspeed_convert(tmp_path: Path) -> None:
    names = ("traj_envs", "deepspeed_zero", "deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero3_cpuoffload")
    changes = {
        "defaults": [f"../config/{name}@_here_" for name in names],
        "actor_train.strategy_args": {"strategy_name": "deepspeed_train", "strategy_config": "${deepspeed_zero3}"},
    }
    result = converted(tmp_path, changes)
    assert setting(result, "learner.sharding") == "zero3"
    assert "FSDP2" in told(result, "actor_train.strategy_args.strategy_name")
    assert "FSDP2" in told(result, "actor_train.strategy_args.strategy_config")
