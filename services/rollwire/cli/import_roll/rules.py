"""Keys of ROLL that become nothing: what is to be told about them. The first rule that fits a key decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from rollwire.cli.import_roll.account import Fate, dotted
from rollwire.cli.import_roll.conversion import Conversion


@dataclass(frozen=True)
class Rule:
    """What is told about the keys of a pattern.

    Attributes:
        pattern: Dotted path; `*` stands for anything.
        fate: What became of them.
        why: Why, one line.
        neutral: Values that ask for nothing, about which nothing is told.
    """

    pattern: str
    fate: Fate
    why: str
    neutral: Sequence[Any] = ()


_DEFAULT_FILTER: Final = "roll.pipeline.agentic.agentic_pipeline.GroupFilter"
_NO_JUDGE: Final = "rewards come from environments alone; there is no judge"
_NOT_DISTILLED: Final = "there is no on-policy distillation"
_OWN_DATA: Final = "the agentic pipeline reads no data files; templates are the tokenizer's own"

RULES: Final[Sequence[Rule]] = (
    # Nothing reads these in ROLL either.
    Rule("render_save_dir", Fate.DEAD, "a directory is made up and never written to"),
    Rule("num_gpus_per_node", Fate.DEAD, "overwritten with the number of devices found"),
    Rule("*.data_args", Fate.DEAD, _OWN_DATA),
    Rule("*.data_args.*", Fate.DEAD, _OWN_DATA),
    Rule("*_env_manager.format_penalty", Fate.DEAD, "the penalty is env_config.format_penalty of each tag"),
    Rule("*.model_args.flash_attn", Fate.DEAD, "the key is attn_implementation; the device's default is used"),
    Rule("*.generating_args.num_return_sequences", Fate.DEAD, "ROLL forces it to 1"),
    Rule("*.offload_nccl", Fate.DEAD, "ROLL forces it to false"),
    Rule("reward_normalization.global_*", Fate.DEAD, "read, but without effect"),
    Rule("custom_envs.*.user_prompt_format", Fate.DEAD, "the key is agent_template"),
    Rule("custom_envs.*.env_config.seed", Fate.DEAD, "ROLL overwrites it with the group's seed"),
    Rule("custom_envs.*.env_config.map_seed", Fate.DEAD, "the seed of the reset decides the map"),
    Rule("norm_*_type", Fate.DEAD, "the agentic pipeline reads reward_normalization.norm_*_type"),
    Rule("dirty_data_mask", Fate.DEAD, "never read"),
    Rule("open_feedback_turn", Fate.DEAD, "never read"),
    Rule("use_token_reward", Fate.DEAD, "never read"),
    Rule("use_reward_scaling", Fate.DEAD, "never read"),
    Rule("use_reward_norm", Fate.DEAD, "never read"),
    Rule("l2", Fate.DEAD, "never read"),
    # Rollwire has no use for these.
    Rule("hydra", Fate.IGNORED, "Hydra is not used; paths are relative to the working directory"),
    Rule("hydra.*", Fate.IGNORED, "Hydra is not used; paths are relative to the working directory"),
    Rule("logging_dir", Fate.IGNORED, "the logs of all processes are in the run's directory"),
    Rule("transfer_backend*", Fate.IGNORED, "batches travel over gRPC"),
    Rule("rpc_timeout", Fate.IGNORED, "every call has a deadline of its own; see the section timeouts"),
    Rule("env_monitor*", Fate.IGNORED, "every turn and episode has a deadline; a late one is a failure with a reason"),
    Rule(
        "batch_adjust_mode",
        Fate.IGNORED,
        "batches are neither filled up nor cut: any number of samples is trained once",
    ),
    Rule("router_args*", Fate.IGNORED, "groups go to the rollout server with most room"),
    Rule("generate_opt_level", Fate.IGNORED, "there is one way to generate"),
    Rule("partial_gpu_mode", Fate.IGNORED, "placement decides for all devices"),
    Rule("is_offload*", Fate.IGNORED, "learner.cpu_offload and placement decide"),
    Rule("model_update_buffer_size_mb", Fate.IGNORED, "weights travel in chunks of 1 MiB"),
    Rule("model_download_type", Fate.IGNORED, "models come from a directory or the Hugging Face hub"),
    Rule("report_length_and_rewards", Fate.IGNORED, "run.db holds every episode"),
    Rule("*profiler*", Fate.IGNORED, "there is no profiler"),
    Rule("otlp_output_dir", Fate.IGNORED, "there is no tracing"),
    Rule("base_dir", Fate.IGNORED, "run.output_dir says where everything goes"),
    Rule("local_rank", Fate.IGNORED, "torchrun or the launcher says it"),
    Rule("num_nodes", Fate.IGNORED, "torchrun says it"),
    Rule("actor_infer.infer_batch_size", Fate.IGNORED, "the engine batches continuously"),
    Rule("*.infer_batch_size", Fate.IGNORED, "scoring keeps to learner.micro_batch_tokens"),
    Rule("*.use_dynamic_batching_in_infer", Fate.IGNORED, "scoring keeps to learner.micro_batch_tokens"),
    Rule("*.max_tokens_per_microbatch_in_infer", Fate.IGNORED, "scoring keeps to learner.micro_batch_tokens"),
    Rule("*.sequence_length_round_in_*", Fate.IGNORED, "micro-batches are padded to their longest sample"),
    Rule("*.use_sequence_packing", Fate.IGNORED, "the learner decides how samples share a forward pass"),
    Rule("*.sequence_packing_args*", Fate.IGNORED, "the learner decides how samples share a forward pass"),
    Rule("*.apply_loss_scale", Fate.IGNORED, "the loss is a sum with weights over the whole optimizer step"),
    Rule("*.backend_timeout", Fate.IGNORED, "see the section timeouts"),
    Rule("*.max_concurrency", Fate.IGNORED, "there are no Ray actors"),
    Rule("*.num_gpus_per_worker", Fate.IGNORED, "rollout.vllm.tensor_parallel_size says it"),
    Rule("*.world_size", Fate.IGNORED, "device_mapping says it"),
    Rule("*.name", Fate.IGNORED, "workers have no names"),
    Rule("actor_train.training_args.*", Fate.IGNORED, "the learner has no such setting"),
    Rule("actor_infer.training_args.*", Fate.IGNORED, "a rollout server does not train"),
    Rule("actor_infer.model_args.*", Fate.IGNORED, "the engine serves what the learner trains; see the section model"),
    Rule("*.model_args.model_type", Fate.IGNORED, "policies are causal language models", neutral=(None,)),
    Rule("*.model_args.device_map", Fate.IGNORED, "device says it"),
    Rule("*.model_args.gradient_checkpointing_use_reentrant", Fate.IGNORED, "never re-entrant"),
    Rule("*_env_manager.max_env_num_per_worker", Fate.IGNORED, "one environment server runs all sessions"),
    Rule("*_env_manager.max_traj_per_env", Fate.IGNORED, "episodes are not tied to environments"),
    Rule("*_env_manager.worker_cls", Fate.IGNORED, "the environment server takes its place"),
    Rule("custom_envs.*.use_thread_lock", Fate.IGNORED, "environments draw from generators of their own"),
    Rule("custom_envs.*.max_env_step_concurrent", Fate.IGNORED, "environment.max_sessions bounds them all"),
    Rule("custom_envs.*.history_length", Fate.IGNORED, "the policy sees the whole conversation"),
    Rule("custom_envs.*.env_config.render_mode", Fate.IGNORED, "every environment can be drawn at any time"),
    Rule(
        "system_envs.USE_MODELSCOPE",
        Fate.IGNORED,
        "models come from a directory or the Hugging Face hub; download it first",
    ),
    Rule("system_envs.VLLM_ASCEND_ENABLE_NZ", Fate.IGNORED, "the rollout server sets it to 0 itself on NPUs"),
    Rule("system_envs.HCCL_*_SOCKET_PORT_RANGE", Fate.IGNORED, "servers on NPUs set it to auto themselves"),
    Rule("*system_envs.*", Fate.IGNORED, "export it in the shell that starts Rollwire; servers inherit it"),
    Rule(
        "*system_envs", Fate.IGNORED, "servers inherit the variables of the shell that starts them", neutral=({}, None)
    ),
    # Rollwire cannot do these.
    Rule("ppo_epochs", Fate.UNSUPPORTED, "a batch is trained once", neutral=(1,)),
    Rule("whiten_rewards", Fate.UNSUPPORTED, "only advantages are whitened", neutral=(False, None)),
    Rule("add_len_reward", Fate.UNSUPPORTED, "rewards come from environments alone", neutral=(False, None)),
    Rule("skip_mock_system_prompt", Fate.IGNORED, "chat templates are rendered whole; nothing is cut away"),
    Rule(
        "exp_mode",
        Fate.UNSUPPORTED,
        "a run trains; it validates as the section validation says",
        neutral=("train", None),
    ),
    Rule("rollout_mock*", Fate.UNSUPPORTED, "run.db holds every episode; none are replayed", neutral=({}, None)),
    Rule("rollout_dump_dir", Fate.UNSUPPORTED, "run.db holds every episode", neutral=(None,)),
    Rule("reward", Fate.UNSUPPORTED, _NO_JUDGE, neutral=({}, None)),
    Rule("reward.*", Fate.UNSUPPORTED, _NO_JUDGE),
    Rule("teacher*", Fate.UNSUPPORTED, _NOT_DISTILLED),
    Rule("student_*", Fate.UNSUPPORTED, _NOT_DISTILLED),
    Rule("use_opd", Fate.UNSUPPORTED, _NOT_DISTILLED, neutral=(False, None)),
    Rule("is_pure_opd", Fate.UNSUPPORTED, _NOT_DISTILLED, neutral=(False, None)),
    Rule("*_env_manager.group_size_redundancy", Fate.UNSUPPORTED, "a group is all of its episodes", neutral=(0,)),
    Rule(
        "*_env_manager.group_filter_cls",
        Fate.UNSUPPORTED,
        "groups are filtered by variance alone",
        neutral=(_DEFAULT_FILTER,),
    ),
    Rule("*_env_manager.llm_proxy.proxy_type", Fate.UNSUPPORTED, "only the policy plays", neutral=("policy", None)),
    Rule("*_env_manager.llm_proxy*", Fate.UNSUPPORTED, "only the policy plays", neutral=({}, None)),
    Rule("*.model_update_frequency", Fate.UNSUPPORTED, "every step's weights are served", neutral=(1,)),
    Rule("*.model_args.ulysses_size", Fate.UNSUPPORTED, "sequences are not split over ranks", neutral=(1, None)),
    Rule("*.model_args.lora_*", Fate.IGNORED, "adapters are actor_train's", neutral=(None,)),
    Rule("*.model_args.*", Fate.UNSUPPORTED, "the learner has no such setting", neutral=(None,)),
    Rule("*.generating_args.num_beams", Fate.UNSUPPORTED, "tokens are sampled", neutral=(1, None)),
    Rule(
        "*.generating_args.repetition_penalty",
        Fate.UNSUPPORTED,
        "the learner scores the plain distribution",
        neutral=(1, None),
    ),
    Rule("*.generating_args.*", Fate.UNSUPPORTED, "sampling has temperature, top_p and top_k alone", neutral=(None,)),
    Rule("actor_train.topr_*", Fate.UNSUPPORTED, "only topr has these weights, and both are 1", neutral=(1, None)),
    Rule("*.router_replay*", Fate.UNSUPPORTED, "routing of experts is not recorded", neutral=("disable", {}, None)),
    Rule("*.logits_in_fp32", Fate.IGNORED, "log-probabilities are always computed in float32"),
    Rule("*.mtp_training_mode", Fate.UNSUPPORTED, "there is no multi-token prediction", neutral=("disabled", None)),
    Rule(
        "custom_envs.*.tool_wrapper*", Fate.UNSUPPORTED, "there are no tools around an environment", neutral=({}, None)
    ),
    Rule("custom_envs.*.agent_runner_cls", Fate.UNSUPPORTED, "the rollout server plays the episodes", neutral=(None,)),
)


def apply_rules(conversion: Conversion) -> None:
    """Accounts for what is left. A key that no rule fits is told about as unknown, if it is the file's own."""
    for path, leaf in conversion.tree.leaves.items():
        if path in conversion.account:
            continue
        name = dotted(path)
        rule = next((rule for rule in RULES if fnmatchcase(name, rule.pattern)), None)
        if rule is not None and (leaf.problem is not None or leaf.value not in rule.neutral):
            conversion.mark(path, rule.fate, rule.why)
        elif rule is not None or (leaf.value is None and leaf.problem is None):
            conversion.used(path)  # it asks for nothing
        elif conversion.tree.is_referenced(path):
            conversion.used(path)  # a variable; the keys that read it are accounted for
        elif leaf.own:
            conversion.mark(path, Fate.UNKNOWN, "is it misspelt? ROLL's loader takes such keys without a word")
