"""Policy model and learner: the sections about training workers."""

from __future__ import annotations

import math
from typing import Final

from rollwire.cli.import_roll.account import Fate
from rollwire.cli.import_roll.conversion import Conversion
from rollwire.cli.import_roll.optimizer_steps import BATCH_KEYS, optimizer_steps
from rollwire.cli.import_roll.run import episode_tokens
from rollwire.serving.config import ConfigError

_PRECISIONS: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ATTENTION: Final = {"auto": "auto", "sdpa": "sdpa", "fa2": "auto"}
_SCHEDULES: Final = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_RATIO_DIGITS: Final = 6
_TRAIN: Final = "actor_train"


def map_model(conversion: Conversion) -> None:
    """Maps the model, its attention, and the element types of learner and rollout servers."""
    own, shared = f"{_TRAIN}.model_args.model_name_or_path", "pretrain"
    key = own if conversion.text(own) is not None else shared
    path = conversion.text(key)
    if path is None:
        raise ConfigError(f"{conversion.file.name} names no model; set {shared}")
    conversion.put("model.path", path, key)
    conversion.rest(shared, Fate.IGNORED, f"{own} says it")
    attention = f"{_TRAIN}.model_args.attn_implementation"
    if conversion.value(attention) is not None:
        name = conversion.choice(attention, tuple(_ATTENTION))
        why = (
            "is the device's default; model.attention=flash_attention_2 needs flash-attn on CUDA and torch-npu on NPUs"
        )
        conversion.put("model.attention", _ATTENTION[name], attention, change=why if name == "fa2" else "")
    conversion.used(attention)
    trained, served = (f"{worker}.model_args.dtype" for worker in (_TRAIN, "actor_infer"))
    conversion.put("learner.precision", _PRECISIONS[conversion.choice(trained, tuple(_PRECISIONS))], trained)
    name = conversion.choice(served, tuple(_PRECISIONS))
    change = "weights are served in float32 or bfloat16: bfloat16" if name == "fp16" else ""
    conversion.put("model.dtype", "float32" if name == "fp32" else "bfloat16", served, change=change)


def map_optimizer(conversion: Conversion, worker: str, target: str) -> None:
    """Maps AdamW, its schedule and its steps.

    Args:
        conversion: The conversion.
        worker: `actor_train` or `critic`.
        target: Section of Rollwire, such as `learner.optimizer`.
    """
    section = f"{worker}.training_args"
    names = {
        "learning_rate": "learning_rate",
        "weight_decay": "weight_decay",
        "adam_beta1": "beta1",
        "adam_beta2": "beta2",
    }
    for name, ours in names.items():
        conversion.put(f"{target}.{ours}", conversion.number(f"{section}.{name}"), f"{section}.{name}")
    conversion.put(f"{target}.max_grad_norm", conversion.number("max_grad_norm"), "max_grad_norm")
    steps = conversion.settings.get(("run", "max_steps")) * optimizer_steps(conversion, _TRAIN).count
    warmup = _warmup(conversion, section, target, steps)
    key = f"{section}.lr_scheduler_type"
    name = conversion.text(key) or "linear"
    if name not in _SCHEDULES:
        conversion.put(f"{target}.schedule", "constant", key)
        conversion.mark(
            key, Fate.UNSUPPORTED, f"{name} is not there; the rate stays constant ({', '.join(_SCHEDULES)})"
        )
        return
    conversion.put(f"{target}.schedule", _SCHEDULES[name], key)
    if name == "linear" and steps > warmup + 1:
        # ROLL's last step still has a rate: it reaches 0 one step later.
        ratio = round(1 / (steps - warmup), _RATIO_DIGITS)
        note = "what ROLL's linear schedule leaves in the last of its steps, by their number and warm-up"
        conversion.put(f"{target}.final_learning_rate_ratio", ratio, key, note=note)


def map_learner(conversion: Conversion) -> None:
    """Maps how a batch is divided, and what a forward pass may hold."""
    section = f"{_TRAIN}.training_args"
    keys = ["rollout_batch_size", *(f"{section}.{key}" for key in BATCH_KEYS), f"{_TRAIN}.device_mapping"]
    division = optimizer_steps(conversion, _TRAIN)
    conversion.put("learner.optimizer_steps_per_batch", division.count, *keys)
    if not division.exact:
        why = (
            f"{division.episodes} episodes an optimizer step do not divide the batch: {division.count} steps of nearly "
            "equal size; ROLL fills the last one up with episodes that it trains twice"
        )
        conversion.mark(keys[2], Fate.CHANGED, why)
    _micro_batch(conversion, f"{section}.{BATCH_KEYS[0]}")
    off = f"{_TRAIN}.model_args.disable_gradient_checkpointing"
    conversion.put("learner.gradient_checkpointing", not conversion.flag(off), off)
    map_optimizer(conversion, _TRAIN, "learner.optimizer")


def map_critic(conversion: Conversion) -> None:
    """Maps the critic, which exists for gae alone."""
    warmup = "critic_warmup"
    if conversion.settings.get(("algorithm", "advantage")) != "gae":
        conversion.rest("critic", Fate.DEAD, "only adv_estimator=gae has a critic")
        for key in (warmup, "value_clip", "reward_pretrain"):
            conversion.rest(key, Fate.IGNORED, "only a critic reads it, which adv_estimator=gae alone has")
        return
    own = "critic.model_args.model_name_or_path"
    key = own if conversion.text(own) is not None else "reward_pretrain"
    path = conversion.text(key)
    if path is not None and path != conversion.settings.get(("model", "path")):
        conversion.put("learner.critic.path", path, key)
    conversion.used(key, "reward_pretrain")
    conversion.put("learner.critic.warmup_steps", conversion.integer(warmup), warmup)
    map_optimizer(conversion, "critic", "learner.critic.optimizer")
    if conversion.value("value_clip") is not None:
        conversion.put("algorithm.value_clip", conversion.number("value_clip"), "value_clip")
    conversion.used("value_clip")
    same = optimizer_steps(conversion, "critic").count == optimizer_steps(conversion, _TRAIN).count
    for name in BATCH_KEYS:
        batch_key = f"critic.training_args.{name}"
        if same:
            conversion.used(batch_key)
        else:
            conversion.mark(
                batch_key, Fate.CHANGED, "the critic divides a batch into as many optimizer steps as the policy"
            )
    conversion.rest("critic", Fate.IGNORED, "the learner holds the critic, on its own devices and in its own precision")


def _warmup(conversion: Conversion, section: str, target: str, steps: int) -> int:
    count, ratio = f"{section}.warmup_steps", f"{section}.warmup_ratio"
    warmup = conversion.integer(count)
    if warmup == 0:
        warmup = math.ceil(steps * conversion.number(ratio))
        conversion.put(f"{target}.warmup_steps", warmup, count, ratio)
    else:
        conversion.put(f"{target}.warmup_steps", warmup, count)
        conversion.rest(ratio, Fate.IGNORED, "warmup_steps says it")
    return warmup


def _micro_batch(conversion: Conversion, micro: str) -> None:
    """Maps the token budget of a forward pass: what the micro-batch comes to when every episode is at its longest."""
    dynamic, tokens = (
        f"{_TRAIN}.{key}" for key in ("use_dynamic_batching_in_train", "max_tokens_per_microbatch_in_train")
    )
    longest, keys = episode_tokens(conversion)
    if conversion.flag(dynamic) and conversion.value(tokens):
        conversion.put("learner.micro_batch_tokens", max(conversion.integer(tokens), longest), tokens)
    else:
        conversion.put("learner.micro_batch_tokens", max(64, conversion.integer(micro, 1) * longest), micro, *keys)
        conversion.rest(tokens, Fate.IGNORED, "use_dynamic_batching_in_train is not set")
    conversion.used(dynamic)
