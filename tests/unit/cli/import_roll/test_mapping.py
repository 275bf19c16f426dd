"""What single keys become. The quick start and ROLL's FrozenLake examples as a whole, then one key at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from roll_files import FIXTURES, QUICK_START, converted, setting, told

from rollwire.cli.import_roll.convert import convert
from rollwire.environment.registry import load_registry
from rollwire.serving.config import ConfigError, RunConfig

NORMALISATION = "reward_normalization"
PG_WORKER = {"actor_train.worker_cls": "roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker"}


def fixture(name: str) -> RunConfig:
    return RunConfig.model_validate(convert(FIXTURES / f"{name}.yaml").conversion.settings.plain())


def test_the_quick_start_keeps_its_numbers() -> None:
    config = fixture("quick_start")
    assert (config.run.name, config.run.seed, config.run.max_steps) == ("roll-quick-start-npu", 42, 1)
    assert (config.batch.groups_per_step, config.batch.episodes_per_group) == (4, 2)
    assert (config.validation.episodes, config.validation.every_steps) == (2, 1000)
    assert config.tracking.log_dir == "./output/tensorboard"
    assert (config.rollout.max_episode_tokens, config.rollout.max_new_tokens_per_turn) == (2048, 128)
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k) == (0.99, 1.0, 0)
    assert (config.algorithm.advantage, config.algorithm.whiten_advantages) == ("grpo", True)
    assert config.algorithm.kl.coefficient == 0.0
    assert (config.learner.optimizer_steps_per_batch, config.algorithm.recompute_old_logprobs) == (4, True)
    assert (config.learner.world_size, config.learner.sharding, config.learner.fsdp_size) == (1, "zero3", 0)
    assert config.learner.optimizer.learning_rate == 1e-6
    assert (config.model.dtype, config.learner.precision, config.model.attention) == ("bfloat16", "bfloat16", "auto")
    assert (config.device, config.rollout.engine) == ("auto", "auto")
    assert config.environment.definitions["FrozenLake"].options["is_slippery"] is False


def test_the_quick_start_is_told_what_is_different() -> None:
    result = convert(QUICK_START)
    assert "no baseline of the group" in told(result, "adv_estimator")
    assert "overwritten" in told(result, "num_gpus_per_node")
    assert told(result, "render_save_dir").startswith("Dead")
    assert told(result, "actor_train.strategy_args.strategy_config.use_batched_model_update").startswith("Dead")
    assert told(result, "reference.strategy_args.strategy_name").startswith("Dead")
    assert "top_p 0.7" in told(result, "actor_infer.generating_args.top_p")
    assert "top_k 50" in told(result, "actor_infer.generating_args.top_k")
    assert told(result, "seed") == "", "nothing is different"


@pytest.mark.parametrize(
    ("name", "steps", "staleness", "learner", "servers"),
    [
        ("base", 1, 0, 8, 8),
        ("async", 1, 1, 4, 4),
        ("gigpo", 1, 0, 8, 8),
        ("pg_var", 1, 0, 8, 8),
        ("pg_var_is_correct", 1, 0, 8, 8),
        ("single_node_demo", 1, 0, 1, 1),
        ("multi_nodes_demo", 1, 0, 4, 4),
    ],
)
def test_the_frozen_lake_examples_keep_their_arithmetic(
    name: str, steps: int, staleness: int, learner: int, servers: int
) -> None:
    config = fixture(name)
    assert config.learner.optimizer_steps_per_batch == steps
    assert config.max_staleness == staleness
    assert config.learner.world_size == learner
    about_devices = told(convert(FIXTURES / f"{name}.yaml"), "actor_infer.device_mapping")
    assert (f"{servers} rollout servers" in about_devices) == (servers > 1)
    assert config.placement == ("separate" if name == "async" else "colocated")
    assert config.rollout.vllm.sleep_mode == (name != "async")
    assert [entry.tag for entry in config.environments if entry.weight > 0] == ["FrozenLake"]


def test_tags_that_only_validation_plays_get_no_weight() -> None:
    result = convert(FIXTURES / "base.yaml")
    assert setting(result, "environments") == [
        {"tag": "FrozenLake"},
        {"tag": "SimpleSokoban", "weight": 0.0},
        {"tag": "LargerSokoban", "weight": 0.0},
        {"tag": "SokobanDifferentGridVocab", "weight": 0.0},
    ]
    assert setting(result, "validation.episodes") == 256
    assert told(result, "val_env_manager.tags") == told(result, "val_batch_size") == ""
    assert "FrozenLakeLocallyDefineExamples" not in setting(result, "environment.definitions")
    result = convert(FIXTURES / "single_node_demo.yaml")
    assert setting(result, "validation.episodes") == 8
    assert "every tag that is played is validated on 8 start states" in told(result, "val_batch_size")


def test_what_is_converted_can_be_constructed() -> None:
    environment = fixture("base").environment
    found = load_registry(environment).environments
    assert found["SimpleSokoban"].options["dim_room"] == [6, 6]
    larger = found["LargerSokoban"].factory(**found["LargerSokoban"].options)
    assert (larger.max_turns, len(larger.reset(1)[0].splitlines())) == (10, 10)
    letters = found["SokobanDifferentGridVocab"].factory(**found["SokobanDifferentGridVocab"].options)
    assert letters.reset(1)[0].splitlines()[0] == "WWWWWW"


def test_tags_without_an_environment_are_named_and_the_rest_converts(tmp_path: Path) -> None:
    result = converted(tmp_path, {"custom_envs.SimpleSokoban": "${custom_env.WebShopEnv}"}, base="base")
    about = told(result, "val_env_manager.tags")
    assert about == "Unsupported: SimpleSokoban: env_type webshop is not in Rollwire"
    assert [entry["tag"] for entry in setting(result, "environments")] == [
        "FrozenLake",
        "LargerSokoban",
        "SokobanDifferentGridVocab",
    ]


def test_ids_of_gem_go_to_gem_with_all_that_they_are_configured_with(tmp_path: Path) -> None:
    config = {"max_steps": 5, "min_number": 1, "max_number": 3, "seed": 4}
    entry = {"env_type": "game:GuessTheNumber-v0-easy", "max_steps": 9, "env_config": config}
    result = converted(tmp_path, {"custom_envs.FrozenLake": entry})
    assert setting(result, "environment.definitions.FrozenLake") == {
        "type": "gem",
        "options": {
            "id": "game:GuessTheNumber-v0-easy",
            "max_turns": 5,
            "kwargs": {"min_number": 1, "max_number": 3},
        },
    }
    assert told(result, "custom_envs.FrozenLake.env_config.seed").startswith("Dead")
    result = converted(tmp_path, {"custom_envs.FrozenLake": {"env_type": "rg:leg_counting"}})
    assert setting(result, "environment.definitions.FrozenLake") == {
        "type": "gem",
        "options": {"id": "rg:leg_counting"},
    }


def test_symbols_that_are_no_single_characters_are_refused(tmp_path: Path) -> None:
    changes = {"custom_envs.FrozenLake": {"env_type": "sokoban", "env_config": {"grid_lookup": {0: "##", 1: "_"}}}}
    with pytest.raises(ConfigError, match=r"grid_lookup gives the symbols .*allowed: one character for each of 0 to 6"):
        converted(tmp_path, changes)


def test_sampling_of_validation_is_its_own() -> None:
    config = fixture("base")
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k) == (0.99, 1.0, 0)
    validation = config.validation.sampling
    assert (validation.temperature, validation.top_p, validation.top_k) == (0.2, 0.99, 100)


def test_topr_and_its_filter() -> None:
    config = fixture("pg_var_is_correct").algorithm
    assert config.policy_loss == "topr_token"
    assert [mask.model_dump() for mask in config.importance_masks] == [
        {"level": "segment_mean", "min_ratio": 0.8, "max_ratio": 1.05}
    ]
    result = convert(FIXTURES / "pg_var_is_correct.yaml")
    assert "only ratios" in told(result, "train_infer_correction.filters.0.diff_enabled")


def test_gigpo_and_its_divergence() -> None:
    config = fixture("gigpo")
    assert (config.algorithm.advantage, config.algorithm.gamma) == ("gigpo", 0.95)
    assert config.algorithm.kl.model_dump(include={"coefficient", "apply_to", "estimator"}) == {
        "coefficient": 0.01,
        "apply_to": "loss",
        "estimator": "k3",
    }
    assert config.algorithm.recompute_old_logprobs


@pytest.mark.parametrize(
    ("normalisation", "group_size", "advantage", "whitened"),
    [
        (None, 2, "grpo", False),
        ({"grouping": "traj_group_id", "method": "mean_std"}, 2, "grpo", False),
        ({"grouping": "traj_group_id", "method": "mean"}, 2, "dr_grpo", False),
        ({"grouping": "batch", "method": "mean_std"}, 2, "reinforce", True),
        ({"grouping": "tags", "method": "identity"}, 2, "reinforce", False),
        ({"grouping": "traj_group_id", "norm_mean_type": "group"}, 2, "dr_grpo", False),
        ({"grouping": "traj_group_id", "norm_mean_type": "group", "norm_std_type": "batch"}, 2, "dr_grpo", True),
        ({"grouping": "traj_group_id", "method": "mean_std"}, 1, "reinforce", False),
        (None, 1, "reinforce", False),
    ],
)
def test_the_normalisation_of_scores_decides_the_estimator(
    tmp_path: Path, normalisation: dict[str, str] | None, group_size: int, advantage: str, whitened: bool
) -> None:
    changes: dict[str, Any] = {"train_env_manager.group_size": group_size, "whiten_advantages": False}
    changes |= {} if normalisation is None else {NORMALISATION: normalisation}
    result = converted(tmp_path, changes)
    assert setting(result, "algorithm.advantage") == advantage
    assert setting(result, "algorithm.whiten_advantages") is whitened
    if advantage != "grpo":
        assert told(result, "adv_estimator") or told(result, NORMALISATION + ".grouping")


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"adv_estimator": "reinforce", "gamma": 0.9}, "algorithm.advantage", "reinforce_plus_plus"),
        ({"adv_estimator": "reinforce", "gamma": 0.9}, "algorithm.gamma", 0.9),
        ({"adv_estimator": "step_reinforce"}, "algorithm.gamma", 0.95),
        ({"adv_estimator": "agentic_reinforce"}, "algorithm.advantage", "reinforce"),
        ({"adv_estimator": "agentic_reinforce", "gamma": 0.9}, "algorithm.advantage", "step_reinforce"),
        ({"adv_estimator": "gigpo", "step_reward_weight": 1, "episode_reward_weight": 2}, "algorithm.gamma", 0.95),
        (
            {"adv_estimator": "gigpo", "step_reward_weight": 1, "episode_reward_weight": 2},
            "algorithm.step_advantage_weight",
            0.5,
        ),
        ({"dual_clip_loss": True, "pg_clip": 0.1}, "algorithm.dual_clip", 1.2),
        ({"pg_clip": 0.1}, "algorithm.clip_high", 0.1),
        ({**PG_WORKER, "actor_train.pg_variant": "cispo"}, "algorithm.policy_loss", "cispo"),
        ({**PG_WORKER, "actor_train.pg_variant": "cispo"}, "algorithm.clip_low", 0.1),
        ({**PG_WORKER, "actor_train.pg_variant": "tis"}, "algorithm.clip_high", 0.0),
        ({**PG_WORKER, "actor_train.pg_variant": "kimi15"}, "algorithm.policy_loss", "policy_gradient"),
        ({**PG_WORKER, "actor_train.pg_variant": "ppo", "pg_clip": 0.3}, "algorithm.clip_low", 0.3),
        (PG_WORKER, "algorithm.policy_loss", "policy_gradient"),
        ({"ratio_type": "segment"}, "algorithm.policy_loss", "gspo_segment"),
        ({"loss_agg_mode": "token-mean"}, "algorithm.aggregation", "token_mean"),
        ({"add_token_level_kl": True, "init_kl_coef": 0.1}, "algorithm.kl.estimator", "k1"),
        ({"add_token_level_kl": True, "init_kl_coef": 0.1, "kl_penalty": "mse"}, "algorithm.kl.estimator", "k2"),
        ({"init_kl_coef": 0.1}, "algorithm.kl", None),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, "algorithm.kl.apply_to", "loss"),
        ({"train_infer_correction": {"is_weight": {"enabled": True, "upper_bound": None}}}, "algorithm.kl", None),
        ({"force_disable_old_logprobs_recompute": True}, "algorithm.recompute_old_logprobs", False),
        ({"actor_train.training_args.gradient_accumulation_steps": 8}, "algorithm.recompute_old_logprobs", False),
        ({"actor_train.training_args.gradient_accumulation_steps": 3}, "learner.optimizer_steps_per_batch", 3),
        ({"actor_train.device_mapping": "list(range(0,2))"}, "learner.optimizer_steps_per_batch", 2),
        ({"actor_train.training_args.lr_scheduler_type": "cosine"}, "learner.optimizer.schedule", "cosine"),
        ({"actor_train.training_args.lr_scheduler_type": "polynomial"}, "learner.optimizer.schedule", "constant"),
        ({"actor_train.training_args.warmup_ratio": 0.5}, "learner.optimizer.warmup_steps", 2),
        ({"actor_train.model_args.lora_target": "all-linear"}, "learner.lora.alpha", 16.0),
        ({"actor_train.model_args.lora_target": "q_proj, v_proj"}, "learner.lora.target_modules", ["q_proj", "v_proj"]),
        ({"actor_train.model_args.lora_target": ".*proj$"}, "learner.lora.target_modules", "auto"),
        ({"actor_train.model_args.lora_rank": 4}, "learner.lora", None),
        ({"actor_train.model_args.dtype": "fp16"}, "learner.precision", "float16"),
        ({"actor_infer.model_args.dtype": "fp16"}, "model.dtype", "bfloat16"),
        ({"actor_train.model_args.attn_implementation": "sdpa"}, "model.attention", "sdpa"),
        ({"actor_infer.strategy_args.strategy_name": "sglang"}, "rollout.engine", "auto"),
        ({"async_generation_ratio": 1.5}, "max_staleness", 2),
        ({"max_steps": -1}, "run.max_steps", 100),
        ({"eval_steps": 0}, "validation.episodes", 0),
        ({"save_steps": 0}, "run.checkpoint_every_steps", 0),
        ({"exp_name": "My Run!"}, "run.name", "my-run-"),
        ({"track_with": "stdout"}, "tracking.log_dir", None),
        ({"tracker_kwargs": {}}, "tracking.log_dir", "./output"),
        ({"val_env_manager.group_size": 2}, "validation.episodes", 2),
        ({"actor_infer.generating_args.temperature": 0}, "sampling.temperature", 1.0),
        ({"actor_infer.generating_args.top_k": -1}, "sampling.top_k", 0),
        ({"custom_envs.FrozenLake": {"env_type": "frozen_lake", "max_steps": 7}}, "rollout.turn_template", None),
    ],
)
def test_one_key_at_a_time(tmp_path: Path, changes: dict[str, Any], key: str, value: object) -> None:
    assert setting(converted(tmp_path, changes), key) == pytest.approx(value)


@pytest.mark.parametrize(
    ("changes", "key", "heading"),
    [
        ({"ppo_epochs": 2}, "ppo_epochs", "Unsupported"),
        ({"async_generation_ratio": 1}, "actor_infer.device_mapping", "Mapped with a change"),
        ({"actor_infer.device_mapping": "[0, 1]"}, "actor_infer.device_mapping", "Mapped with a change"),
        ({"actor_infer.device_mapping": "[1]"}, "actor_infer.device_mapping", "Ignored"),
        ({"whiten_rewards": True}, "whiten_rewards", "Unsupported"),
        ({"gamma": 0.9, "whiten_advantages": False}, "gamma", "Unsupported"),
        ({"train_env_manager.group_size_redundancy": 1}, "train_env_manager.group_size_redundancy", "Unsupported"),
        ({"train_env_manager.num_env_groups": 8}, "train_env_manager.num_env_groups", "Mapped with a change"),
        ({"actor_train.pg_variant": "topr"}, "actor_train.pg_variant", "Dead"),
        ({"actor_train.worker_cls": "mine.Worker"}, "actor_train.worker_cls", "Unsupported"),
        (
            {"actor_train.strategy_args.strategy_name": "deepspeed_train"},
            "actor_train.strategy_args.strategy_name",
            "Mapped",
        ),
        (
            {"actor_train.training_args.gradient_accumulation_steps": 3},
            "actor_train.training_args.gradient_accumulation_steps",
            "Mapped",
        ),
        ({"resume_from_checkpoint": True}, "resume_from_checkpoint", "Unsupported"),
        ({"max_steps": -1}, "max_steps", "Mapped with a change"),
        ({"init_kl_coef": 0.1}, "init_kl_coef", "Ignored"),
        ({"init_kl_coef": 0.1}, "reference.model_args.dtype", "Ignored"),
        ({"reward_clip": 2}, "reward_clip", "Mapped with a change"),
        ({"add_token_level_kl": True, "init_kl_coef": 0.1, "kl_penalty": "abs"}, "kl_penalty", "Mapped with a change"),
        (
            {"custom_envs.FrozenLake": {"env_type": "frozen_lake", "env_config": {"grid_lookup": {"0": "P"}}}},
            "custom_envs.FrozenLake.env_config.grid_lookup.0",
            "Unsupported",
        ),
        (
            {"custom_envs.FrozenLake": {"env_type": "frozen_lake", "env_manager_cls": "a.VLTrajEnvManager"}},
            "custom_envs.FrozenLake.env_manager_cls",
            "Unsupported",
        ),
        (
            {"custom_envs.FrozenLake": {"env_type": "frozen_lake", "agent_template": "{state"}},
            "custom_envs.FrozenLake.agent_template",
            "Unsupported",
        ),
        (
            {"custom_envs.FrozenLake": {"env_type": "frozen_lake", "max_steps": 7, "env_config": {"max_steps": 9}}},
            "custom_envs.FrozenLake.max_steps",
            "Mapped with a change",
        ),
        ({"reward": {"model_args": {"dtype": "bf16"}}}, "reward.model_args.dtype", "Unsupported"),
        ({"sequence_lenght": 4096}, "sequence_lenght", "Unknown"),
    ],
)
def test_what_is_different_is_told(tmp_path: Path, changes: dict[str, Any], key: str, heading: str) -> None:
    assert told(converted(tmp_path, changes), key).startswith(heading)


@pytest.mark.parametrize(
    "key", ["ppo_epochs", "resume_from_checkpoint", "init_kl_coef", "entropy_loss_coef", "max_steps"]
)
def test_what_asks_for_nothing_is_not_told(key: str) -> None:
    assert told(convert(QUICK_START), key) == ""


def test_the_linear_schedule_is_rolls(tmp_path: Path) -> None:
    """ROLL multiplies the rate by 1 - k/T in step k of T; its last step still has a rate."""
    from rollwire.learner.schedule import learning_rate

    plain = converted(tmp_path, {"max_steps": 5}).conversion.settings.plain()
    optimizer = RunConfig.model_validate(plain).learner.optimizer
    total = 5 * 4
    rates = [learning_rate(step, total, optimizer) for step in range(total)]
    assert rates == pytest.approx([1e-6 * (1 - step / total) for step in range(total)], rel=1e-4)


def test_a_value_that_is_computed_says_from_what(tmp_path: Path) -> None:
    (line,) = [line for line in converted(tmp_path, {"max_steps": 5}).yaml.splitlines() if "final_learning" in line]
    assert line.endswith("# what ROLL's linear schedule leaves in the last of its steps, by their number and warm-up")
