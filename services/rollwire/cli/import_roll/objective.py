"""Policy loss, clips, entropy, divergence to a reference, and the correction between engine and learner."""

from __future__ import annotations

from typing import Final

from rollwire.cli.import_roll.account import Fate
from rollwire.cli.import_roll.conversion import Conversion
from rollwire.cli.import_roll.importance import map_importance
from rollwire.cli.import_roll.optimizer_steps import optimizer_steps

_VARIANT_WORKER: Final = "agentic_actor_pg_worker"
_STANDARD_WORKERS: Final = ("agentic_actor_worker", "base_worker")
_CLIP_KEYS: Final = ("pg_clip", "use_pg_clip_range", "pg_clip_low", "pg_clip_high", "dual_clip_loss")
_RATIO_LOSSES: Final = {"token": "ppo_clip", "segment": "gspo_segment"}
_VARIANTS: Final = {
    "vanilla": ("policy_gradient", ""),
    "ppo": ("ppo_clip", ""),
    "topr": ("topr_token", "the sign of the advantage decides, not that of the score"),
    "cispo": ("cispo", ""),
    "tis": ("cispo", "is cispo with the weight bounded to [0.001, 1]"),
}
_AGGREGATIONS: Final = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "fixed_length",
}


def map_objective(conversion: Conversion) -> None:
    """Maps the loss and what is added to it."""
    _policy_loss(conversion)
    _aggregation(conversion)
    conversion.put("algorithm.entropy_coefficient", conversion.number("entropy_loss_coef"), "entropy_loss_coef")
    _old_logprobs(conversion)


def _policy_loss(conversion: Conversion) -> None:
    worker, variant = (f"actor_train.{name}" for name in ("worker_cls", "pg_variant"))
    module = conversion.text(worker) or ""
    if _VARIANT_WORKER in module:
        conversion.used(worker)
        conversion.mark("ratio_type", Fate.IGNORED, "pg_variant decides over what the ratio is taken")
        _variant(conversion, variant)
        return
    conversion.mark(variant, Fate.DEAD, f"only the worker class {_VARIANT_WORKER} reads it")
    if not module or any(name in module for name in _STANDARD_WORKERS):
        conversion.used(worker)
    else:
        conversion.mark(worker, Fate.UNSUPPORTED, "another worker class has no counterpart; the clipped loss is used")
    ratio = conversion.choice("ratio_type", tuple(_RATIO_LOSSES))
    conversion.put("algorithm.policy_loss", _RATIO_LOSSES[ratio], "ratio_type")
    _clips(conversion)


def _variant(conversion: Conversion, key: str) -> None:
    name = conversion.text(key) or "vanilla"
    if name not in _VARIANTS:
        why = f"{name} has no counterpart; the plain policy gradient is used"
        conversion.put("algorithm.policy_loss", "policy_gradient", key)
        conversion.mark(key, Fate.UNSUPPORTED, why)
    else:
        loss, change = _VARIANTS[name]
        conversion.put("algorithm.policy_loss", loss, key, change=change)
    if name == "ppo":
        _clips(conversion)
        return
    if name in ("cispo", "tis"):
        low, high = (0.1, 0.1) if name == "cispo" else (0.999, 0.0)
        conversion.put("algorithm.clip_low", low, key)
        conversion.put("algorithm.clip_high", high, key)
    for clip in _CLIP_KEYS:
        conversion.mark(clip, Fate.IGNORED, f"pg_variant {name} does not read it")
    for weight in ("topr_positive_weight", "topr_negative_weight"):
        if name == "topr" and conversion.value(f"actor_train.{weight}") in (None, 1):
            conversion.used(f"actor_train.{weight}")


def _clips(conversion: Conversion) -> None:
    both, ranges = conversion.number("pg_clip"), conversion.flag("use_pg_clip_range")
    bounds = {side: f"pg_clip_{side}" for side in ("low", "high")}
    for side, key in bounds.items():
        if ranges:
            conversion.put(f"algorithm.clip_{side}", conversion.number(key), key)
        else:
            conversion.put(f"algorithm.clip_{side}", both, "pg_clip")
            conversion.mark(key, Fate.IGNORED, "use_pg_clip_range is not set")
    conversion.used("use_pg_clip_range", "pg_clip")
    if conversion.flag("dual_clip_loss"):
        # ROLL bounds the loss at 1 + 2 · pg_clip times the advantage.
        conversion.put("algorithm.dual_clip", 1 + 2 * both, "dual_clip_loss", "pg_clip")
    conversion.used("dual_clip_loss")


def _aggregation(conversion: Conversion) -> None:
    mode = conversion.choice("loss_agg_mode", tuple(_AGGREGATIONS))
    change = "is the mean over the samples as well, so 1/S of ROLL's sum" if mode == "seq-mean-token-sum-norm" else ""
    conversion.put("algorithm.aggregation", _AGGREGATIONS[mode], "loss_agg_mode", change=change)
    if change:
        tokens = conversion.settings.get(("rollout", "max_episode_tokens"))
        conversion.put("algorithm.fixed_length_tokens", tokens, "loss_agg_mode", change=change)


def _old_logprobs(conversion: Conversion) -> None:
    """Maps who computes the log-probabilities that the ratio is taken against, and what corrects the rest."""
    corrected = map_importance(conversion)
    steps = optimizer_steps(conversion, "actor_train").count
    estimator = conversion.value("adv_estimator")
    stepwise = estimator in ("gigpo", "step_reinforce")
    wanted = conversion.flag("enable_old_logprobs_recompute")
    kl_coefficient = conversion.number("init_kl_coef")
    # What makes ROLL recompute them; its default kl coefficient counts as well.
    recompute = wanted or stepwise or steps > 1 or kl_coefficient > 0
    refused = conversion.flag("force_disable_old_logprobs_recompute")
    keys = ("enable_old_logprobs_recompute", "force_disable_old_logprobs_recompute")
    if refused and recompute and not corrected:
        recompute = False
    note = (
        "" if any(conversion.has(key) for key in keys) else "what ROLL does with these optimizer steps and estimators"
    )
    conversion.put("algorithm.recompute_old_logprobs", recompute or corrected, *keys, note=note)
    if refused and corrected:
        conversion.mark(keys[1], Fate.CHANGED, "train_infer_correction needs log-probabilities of the learner")
